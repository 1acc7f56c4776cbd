"""Doors that stand beside the core, for tests."""
