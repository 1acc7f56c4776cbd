"""Llama Nemotron Rerank VL: a query and a page, through the towers of Embed VL, to one score."""
