"""Engines that are built ahead of time, and stages that are exported for other servers."""
