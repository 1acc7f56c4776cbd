"""Llama Nemotron ColEmbed VL: a query or a page, through towers like Embed VL's, to vectors of tokens."""
