"""TensorRT engines, in both flavours: building and running."""
