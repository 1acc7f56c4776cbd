"""Worker processes: encode, embed, and both in one."""
