"""``python -m benchmarks``, from the repository's root; ``--help`` lists the options."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from benchmarks import report
from benchmarks.broadcast import broadcast
from benchmarks.control import control, extension
from benchmarks.death import death
from benchmarks.graph import graph
from benchmarks.idle import idle
from benchmarks.kv import kv
from benchmarks.lifecycle import lifecycle
from benchmarks.payload import payload
from benchmarks.resources import resources
from benchmarks.sampling import Effort
from benchmarks.tasks import task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.figures import Row

# Those that fork come before those that make this process large.
FAMILIES: dict[str, Callable[[Effort], Iterator[Row]]] = {
    family.__name__: family
    for family in (lifecycle, resources, death, control, extension, task, idle, broadcast, payload, graph, kv)
}


def main() -> None:
    """Measure, print each row when it is there, and sum up."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few samples: whether it runs, not how fast")
    parser.add_argument("--only", action="append", choices=FAMILIES, help="one family; may be given again")
    parser.add_argument("--json", metavar="FILE", help="also write all figures to FILE")
    parser.add_argument(
        "--markdown", metavar="FILE", help="also write the table of docs/benchmarks.md to FILE"
    )
    options = parser.parse_args()
    effort = Effort(quick=options.quick)
    print(report.machine(), flush=True)
    rows = []
    for name in options.only or FAMILIES:
        print(f"\n== {name}", flush=True)
        for row in FAMILIES[name](effort):
            rows.append(row)
            print(report.text(row), flush=True)
    print(f"\n{report.summary(rows)}")
    report.write(rows, json_path=options.json, markdown_path=options.markdown)


if __name__ == "__main__":
    main()
