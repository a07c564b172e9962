"""Plans: whether a model fits on a GPU and how fast it can be there, computed on a machine that need not have one."""
