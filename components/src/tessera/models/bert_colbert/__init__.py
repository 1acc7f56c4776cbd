"""ColBERT with the body of BERT, such as colbertv2.0 and answerai-colbert-small."""
