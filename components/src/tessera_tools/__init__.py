"""Tools beside the service: random checkpoints, load, sizing. No process of the service imports them."""
