"""BERT, and what has its files: MiniLM, BGE, E5, GTE, mxbai-embed, Arctic Embed."""
