"""ONNX Runtime as a runtime, and the conversion of models to ONNX."""
