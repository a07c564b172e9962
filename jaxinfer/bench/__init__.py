"""Benchmarks of the engine: workloads, their driver, measurements and reports."""
