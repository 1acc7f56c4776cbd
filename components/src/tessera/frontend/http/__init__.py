"""The HTTP side of the frontend: connections, middleware, keys, the access log, errors."""
