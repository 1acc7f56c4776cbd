"""HTTP routes, one module for each peer whose paths and shapes are spoken."""
