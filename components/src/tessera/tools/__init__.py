"""Tools beside the service: random checkpoints, sizing, exports. No process of the service imports them."""
