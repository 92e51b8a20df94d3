"""The invariants of control calls (CP) and of the lifecycle (LC), each with real processes."""
