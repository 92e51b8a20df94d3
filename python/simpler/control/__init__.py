"""Chip-control extensions: their register and what their handlers see."""
