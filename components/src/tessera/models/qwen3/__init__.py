"""What the Qwen3 families share: the decoder's configuration, its tensors and the control tokens."""
