"""Engines built ahead of time: what to build, what was built, and the flavours that build."""
