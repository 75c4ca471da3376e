"""PyTorch as a runtime."""
