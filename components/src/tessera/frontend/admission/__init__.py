"""Admits requests: what is in flight at a time, and what one API key may use per minute."""
