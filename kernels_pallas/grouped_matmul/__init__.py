"""Products of rows with matrices of their own groups, as experts are: work grows with the rows, not with the groups.

`reference.py` in plain XLA runs everywhere. A kernel for Hopper GPUs waits for a GPU to be measured on.
"""
