"""Requests, the scheduler and the device step."""
