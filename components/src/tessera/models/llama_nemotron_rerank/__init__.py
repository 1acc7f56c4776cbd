"""Llama Nemotron Rerank: a query and a document, through a bidirectional Llama, to one score."""
