"""Personal model to ONNX: exported, verified, versioned and run without torch."""
