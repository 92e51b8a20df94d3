"""Chip backends: what a platform has to provide, how it is found, and the `cpu` platform."""
