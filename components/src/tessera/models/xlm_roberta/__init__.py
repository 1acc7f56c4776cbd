"""RoBERTa and XLM-RoBERTa: multilingual E5, BGE M3 (dense), Arctic Embed L v2."""
