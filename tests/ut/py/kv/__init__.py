"""KV connectors, stores and the prefix cache."""
