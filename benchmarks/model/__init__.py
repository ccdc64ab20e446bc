"""A cost model of all-reduce on thousands of hosts: ``python -m benchmarks.model``."""
