"""Cross-encoders of RoBERTa and XLM-RoBERTa, such as BGE reranker v2 M3."""
