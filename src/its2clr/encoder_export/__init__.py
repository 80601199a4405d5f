"""A run's encoder for other software: a timm folder with a model card, ONNX, features in TRIDENT's folders."""

from its2clr.encoder_export.export import FORMATS, export_encoder

__all__ = ["FORMATS", "export_encoder"]
