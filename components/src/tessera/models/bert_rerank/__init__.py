"""Cross-encoders of BERT, such as ms-marco-MiniLM."""
