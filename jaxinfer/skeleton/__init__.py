"""Skeleton-of-Thought: the plan, its grammar, its prompts and the answer."""
