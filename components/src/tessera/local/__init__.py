"""Runs engines in child processes of this one, without HTTP: ``engines.Engines`` by a plan of ``plan``."""
