"""The decoder of Ministral 3, and the marks that its tokenizers put around a text."""
