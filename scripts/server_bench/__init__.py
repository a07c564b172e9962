"""What `bench_server.py` is made of: a client on raw sockets, the same requests without HTTP, and a timed server."""
