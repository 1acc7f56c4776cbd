"""What a search finds, for people to look at: read again from its sources, as a page and as a sheet."""
