"""Test suites for those who extend simpler. Needs pytest."""

from simpler.testing.chip_backend import ChipBackendContract
from simpler.testing.kv_connector import KVConnectorContract

__all__ = ["ChipBackendContract", "KVConnectorContract"]
