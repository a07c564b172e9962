"""`DiffusionWorker` and `DiffusionIteration` over plain arrays."""
