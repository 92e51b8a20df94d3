"""Test suites for those who extend simpler. Needs pytest."""

from simpler.testing.chip_backend import ChipBackendContract

__all__ = ["ChipBackendContract"]
