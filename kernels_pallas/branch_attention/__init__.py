"""Attention over paged KV by the visibility rule: branches, draft trees, prefill and decode in one call."""
