"""The connectors that ship, imported when they are first used."""

BUILT_IN: dict[str, tuple[str, str]] = {
    "file": ("simpler.kv.connectors.file", "FileConnector"),
    "multi": ("simpler.kv.connectors.multi", "MultiConnector"),
    "shm": ("simpler.kv.connectors.shm", "ShmConnector"),
}
"""Module path and class name by the name that `KVTransferConfig.kv_connector` takes."""
