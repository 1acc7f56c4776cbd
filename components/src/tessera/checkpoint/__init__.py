"""What a checkpoint directory holds, read without torch: JSON sections and safetensors headers."""
