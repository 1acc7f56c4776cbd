"""What every engine built ahead of time has: a specification, a manifest, a directory."""
