"""The slab: memory allocated once, leased slot by slot, and read by other processes."""
