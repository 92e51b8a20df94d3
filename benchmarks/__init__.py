"""What simpler costs, beside its peers and the floor, in one run: ``python -m benchmarks``."""
