"""Nemotron-3-Embed: a text through Ministral 3's decoder, seen both ways, to a vector."""
