"""The registry of memory in the parent, with chips that only count."""
