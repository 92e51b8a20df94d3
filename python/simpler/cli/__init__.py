"""The command line; needs the extra ``cli`` (typer and rich)."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command that ``sys.argv`` names, and exit with its status."""
    try:
        from simpler.cli.app import app
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("typer", "rich"):
            raise
        sys.exit(f"the command line needs {package}: pip install 'simpler[cli]'")
    app()
