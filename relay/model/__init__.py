"""Model files into weights: sources, GGUF, shapes, and the torch reference forward pass."""
