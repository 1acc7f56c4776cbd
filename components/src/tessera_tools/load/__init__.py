"""Load on a running service: bodies of requests, and the processes of clients that send them."""
