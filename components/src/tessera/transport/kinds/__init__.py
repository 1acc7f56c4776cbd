"""The kinds of hand-off: one module for each, and the choice among them."""
