"""Planning of a device's memory."""
