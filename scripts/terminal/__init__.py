"""What scripts show on a terminal while it grows."""
