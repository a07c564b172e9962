"""The textbook's speculation for scripts and teaching: drafts accepted with min(1, p/q), one sequence at a time."""
