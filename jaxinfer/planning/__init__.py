"""Whether a model fits on a GPU and how fast it can be there, said on a machine that need not have one."""
