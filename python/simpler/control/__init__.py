"""Chip-control extensions: their register and what their handlers see."""

from simpler.control.chip_view import BufferView, BufferViews, ChipView
from simpler.control.registry import register_chip_control_extension, unregister_chip_control_extension

__all__ = [
    "BufferView",
    "BufferViews",
    "ChipView",
    "register_chip_control_extension",
    "unregister_chip_control_extension",
]
