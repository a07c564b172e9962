"""Adapters for training libraries; each needs that library installed."""
