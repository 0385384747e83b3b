"""Personal model to ONNX: exported, verified, versioned, and run on the box.

`preprocess`, `manifest`, `slots`, `runtime` and `cli` work with the `infer` extra alone and import neither torch nor paho;
`to_onnx`, `verify` and `package` belong to the box that trains.
"""
