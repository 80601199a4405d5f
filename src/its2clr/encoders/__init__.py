"""Feature extractors: timm backbones, the projection head, deterministic extraction."""

from its2clr.encoders.encoder import EmbeddingNetwork, Encoder, create_encoder
from its2clr.encoders.extraction import extract_features

__all__ = ["EmbeddingNetwork", "Encoder", "create_encoder", "extract_features"]
