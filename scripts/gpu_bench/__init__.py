"""The GPU benchmark: its plan, the processes that measure the parts, and the report."""
