"""Nemotron ColEmbed VL v2: Qwen3-VL's towers, seen both ways, to a vector of each token."""
