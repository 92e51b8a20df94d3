"""The task graph against a naive model, over random programs."""
