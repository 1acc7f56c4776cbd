"""Clients' APIs that stand beside the core, for tests."""
