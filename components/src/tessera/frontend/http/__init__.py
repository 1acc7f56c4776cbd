"""The HTTP side of the frontend: connections, middleware, keys, admission, the access log, errors."""
