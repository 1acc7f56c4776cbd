"""The decoder of Ministral 3."""
