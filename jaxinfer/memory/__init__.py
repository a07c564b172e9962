"""Where a device's memory goes."""
