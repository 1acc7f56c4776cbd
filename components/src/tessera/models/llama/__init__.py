"""What families with a bidirectional Llama backbone share: its configuration, its tensors, roles and BOS."""
