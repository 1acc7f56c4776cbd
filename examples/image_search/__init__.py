"""Searching a folder of pictures by text or picture, through a running service."""
