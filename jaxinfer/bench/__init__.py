"""Benchmarks of the engine: workloads, what drives them, what is measured, and how it is shown."""
