"""The commands and their options. Typer reads the annotations, so they are evaluated here."""

from pathlib import Path
from typing import Annotated

import typer

from simpler.cli.demo import DEFAULT_PROMPT, DemoOptions, run_demo

app = typer.Typer(add_completion=False, no_args_is_help=True)


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
    """Run a language model split over two chip processes."""
    options = DemoOptions(
        prompt=prompt,
        check=check,
        max_tokens=max_tokens,
        model=model,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        trace=trace,
    )
    raise typer.Exit(run_demo(options))
