"""What there is to see and to say: compositions, where they come from, and their English."""
