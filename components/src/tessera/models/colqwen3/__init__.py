"""ColQwen3: a query or page images, through Qwen3-VL's towers and a projection, to a vector of each token."""
