"""The Transport seam: how vision rows cross from the worker that made them to the one that reads them."""
