"""Branched decoding: several continuations of one trunk."""
