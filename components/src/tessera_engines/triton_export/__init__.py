"""Stages written in the formats of other servers: ONNX files and Triton model repositories."""
