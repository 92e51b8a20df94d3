"""The commands about KV caches. Typer reads the annotations, so they are evaluated here."""

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from simpler.cli.kv_replay import ReplayOptions, run_replay

kv_app = typer.Typer(no_args_is_help=True)


class StoreKind(str, Enum):
    """Where blocks go that the cache has no room for."""

    NONE = "none"
    FILE = "file"


@kv_app.callback()
def _commands() -> None:
    """KV caches: which prefixes are found again, and what moving them takes."""


@kv_app.command("replay")
def replay(
    trace: Annotated[
        Path, typer.Option(help="One JSON object a line: timestamp, input_length, output_length, hash_ids.")
    ],
    *,
    connector: Annotated[
        StoreKind, typer.Option(help="Where blocks go that the cache has no room for.")
    ] = StoreKind.NONE,
    block_size: Annotated[
        int, typer.Option(min=1, help="Tokens of a block; divides 512 or is a multiple of it.")
    ] = 512,
    capacity_blocks: Annotated[int, typer.Option(min=1, help="Blocks of the cache.")] = 20_000,
    block_bytes: Annotated[
        int, typer.Option(min=16, max=1 << 30, help="Bytes that stand for the KV of a block.")
    ] = 4096,
    store: Annotated[Path | None, typer.Option(help="The folder of --connector file.")] = None,
    max_bytes: Annotated[int, typer.Option(min=1, help="Most bytes of that folder.")] = 1 << 30,
    requests: Annotated[int | None, typer.Option(min=1, help="Only so many, from the first on.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write hit rate and latency over time as SVG.")] = None,
) -> None:
    """Replay a trace of requests through a prefix cache, without a model.

    Reports which part of the prompts was found, in the cache or in a store, and how long loading took.
    """
    if (connector is StoreKind.FILE) != (store is not None):
        raise typer.BadParameter("--connector file and --store belong together")
    options = ReplayOptions(
        trace=trace,
        block_size=block_size,
        capacity_blocks=capacity_blocks,
        block_bytes=block_bytes,
        store=store,
        max_bytes=max_bytes,
        requests=requests,
        plot=plot,
    )
    raise typer.Exit(run_replay(options))
