"""Console scripts that prepare what the service runs."""
