"""Several processes, maybe on several hosts, that share one model: the first decides, the others follow."""
