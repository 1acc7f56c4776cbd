"""Memory of this host and of its cards that clients registered, for tensors of their calls."""
