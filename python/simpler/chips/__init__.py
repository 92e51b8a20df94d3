"""Chip backends: what a platform has to provide, how it is found, and the `cpu` platform."""

from simpler.chips.arguments import TensorSpec, pack_arguments
from simpler.chips.backend import BackendFactory, ChipBackend, ChipConfig, Kernel
from simpler.chips.registry import find_backend, installed_backends

__all__ = [
    "BackendFactory",
    "ChipBackend",
    "ChipConfig",
    "Kernel",
    "TensorSpec",
    "find_backend",
    "installed_backends",
    "pack_arguments",
]
