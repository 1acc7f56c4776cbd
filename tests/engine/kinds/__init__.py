"""Kinds of engines that stand beside the core, for tests."""
