"""What `run_specsot.py` is made of: Skeleton-of-Thought as it grows, drawn, compared and weighed."""
