"""A corpus on a Ray cluster, as a pipeline of Ray Data."""
