"""What all-reduce costs on paper, for more hosts than anybody here has: ``python -m benchmarks.model``."""
