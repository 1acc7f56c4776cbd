"""What encoders of the BERT kind share: configuration, names of tensors, prompts of texts and of pairs."""
