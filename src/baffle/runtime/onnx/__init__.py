"""ONNX Runtime as a runtime, and models on their way to it."""
