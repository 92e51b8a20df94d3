"""Finding a platform's backend among the installed packages.

A tree of the built-in platform needs no package's metadata: what reads that (3 MiB of modules) is imported
only where another is asked for, since each fork and each end of a child pays for every page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from simpler.errors import ConfigError

if TYPE_CHECKING:
    from simpler.chips.backend import BackendFactory

ENTRY_POINT_GROUP = "simpler.chip_backends"
_BUILT_IN = "cpu"


def installed_backends() -> tuple[str, ...]:
    """Names of the platforms that can be used, sorted."""
    from importlib import metadata

    found = {point.name for point in metadata.entry_points(group=ENTRY_POINT_GROUP)}
    return tuple(sorted(found | {_BUILT_IN}))


def find_backend(platform: str) -> BackendFactory:
    """The factory of a platform.

    Raises:
        ConfigError: None is installed under that name (it lists those that are), or it does not load.
    """
    if platform == _BUILT_IN:
        from simpler.chips.cpu import CpuChip

        return CpuChip
    from importlib import metadata

    points = metadata.entry_points(group=ENTRY_POINT_GROUP, name=platform)
    for point in points:
        try:
            factory: BackendFactory = point.load()
        except Exception as error:
            raise ConfigError(
                f"the chip backend {platform!r} ({point.value}) does not load: {error}"
            ) from error
        if not callable(factory):
            raise ConfigError(f"the chip backend {platform!r} ({point.value}) is not a factory: {factory!r}")
        return factory
    raise ConfigError(
        f"no chip backend {platform!r} is installed; installed are: {', '.join(installed_backends())}"
    )
