"""The commands and their options. Typer reads the annotations, so they are evaluated here."""

from pathlib import Path
from typing import Annotated

import typer

from simpler.cli.demo import DEFAULT_PROMPT, STORE_CONNECTOR, DemoOptions, run_demo
from simpler.cli.kv import kv_app

app = typer.Typer(add_completion=False, no_args_is_help=True)
app.add_typer(kv_app, name="kv")


@app.callback()
def _commands() -> None:
    """One parent process, one persistent process per accelerator."""


@app.command()
def demo(
    prompt: Annotated[str, typer.Argument(help="What to ask the model.")] = DEFAULT_PROMPT,
    *,
    check: Annotated[
        bool, typer.Option("--check", help="Compare with the same model in one process; fail if they differ.")
    ] = False,
    pipeline: Annotated[
        int | None, typer.Option(min=2, help="Split the layers over that many chips.")
    ] = None,
    tensor_parallel: Annotated[
        int | None,
        typer.Option(min=2, help="Split the heads and columns of each layer over that many chips."),
    ] = None,
    connector: Annotated[
        str | None, typer.Option(help="Move the KV cache by this connector: shm, file, mooncake.")
    ] = None,
    store: Annotated[
        Path | None, typer.Option(help="The folder of --connector file; one of your cache by default.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of the answer.")] = 128,
    model: Annotated[
        Path | None, typer.Option(help="A GGUF file instead of the installed SmolLM2-135M-Instruct.")
    ] = None,
    temperature: Annotated[
        float, typer.Option(min=0, max=100, help="0 always takes the likeliest token.")
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option(min=1e-6, max=1, help="Draw from the likeliest tokens with this share.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the draws at a temperature above 0.")] = 0,
    trace: Annotated[
        Path | None, typer.Option(help="Write a timeline for chrome://tracing or Perfetto.")
    ] = None,
) -> None:
    """Run a language model split over chip processes.

    Without --pipeline and --tensor-parallel one chip reads the prompt and another writes the answer. With
    --connector file a prompt that begins like an earlier one is read from where they part.
    """
    ways = {"--pipeline": pipeline, "--tensor-parallel": tensor_parallel, "--connector": connector}
    chosen = [name for name, value in ways.items() if value is not None]
    if len(chosen) > 1:
        raise typer.BadParameter(f"{' and '.join(chosen)} are {len(chosen)} ways to split: choose one")
    if store is not None and connector != STORE_CONNECTOR:
        raise typer.BadParameter(f"--store belongs to --connector {STORE_CONNECTOR}")
    options = DemoOptions(
        prompt=prompt,
        check=check,
        pipeline=pipeline,
        tensor_parallel=tensor_parallel,
        max_tokens=max_tokens,
        model=model,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        trace=trace,
        connector=connector,
        store=store,
    )
    raise typer.Exit(run_demo(options))
