"""Attention: the visibility rule, its backends, and the plain causal form."""
