"""ColBERT with the body of RoBERTa or XLM-RoBERTa."""
