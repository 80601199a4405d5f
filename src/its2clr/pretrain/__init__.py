"""Self-supervised starts for the encoder."""
