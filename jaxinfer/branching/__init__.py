"""Branches of one request: skeletons, their grammar, and sequences that share a trunk."""
