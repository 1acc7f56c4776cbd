"""Where vectors of a corpus go: one file for each format."""
