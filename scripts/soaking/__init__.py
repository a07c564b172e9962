"""What `soak.py` is made of: a server in a process, requests with known answers, and clients of all manners."""
