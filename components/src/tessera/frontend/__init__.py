"""The frontend process: HTTP in, typed messages out. Knows neither torch nor engines."""
