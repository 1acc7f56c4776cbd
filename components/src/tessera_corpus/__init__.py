"""Corpora: what is embedded in bulk rather than asked for. No process of the service imports this package."""
