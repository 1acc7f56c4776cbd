"""Llama Nemotron Embed: text alone, through a bidirectional Llama, to the mean of all states."""
