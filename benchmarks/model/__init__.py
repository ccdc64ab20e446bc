"""The cost of all-reduce on thousands of hosts, computed and not measured: ``python -m benchmarks.model``."""
