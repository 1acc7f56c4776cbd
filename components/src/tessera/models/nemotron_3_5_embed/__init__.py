"""Nemotron-3.5-Embed: texts and images through Pixtral's tower and Ministral 3's decoder to a vector."""
