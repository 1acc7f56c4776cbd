"""What a corpus is read from: one file for each kind of source."""
