"""Products of rows with their groups' matrices, such as experts: work grows with the rows, not with the groups.

`reference.py` in plain XLA runs everywhere. There is no kernel for Hopper GPUs yet.
"""
