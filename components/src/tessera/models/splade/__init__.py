"""SPLADE on BERT and DistilBERT: weights of the vocabulary's tokens, of a masked language model's logits."""
