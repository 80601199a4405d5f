"""Self-supervised starts for the encoder."""

from its2clr.pretrain.loop import pretrain

__all__ = ["pretrain"]
