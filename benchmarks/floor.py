"""The floor: the exchanges of cpp/ compiled when first wanted, and run beside what is measured."""

from __future__ import annotations

import array
import functools
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.figures import Sampler

SPIN = "bare C++, spinning"
FUTEX = "bare C++, futex"
_SOURCES = Path(__file__).parent / "cpp"
_TIMEOUT_S = 120.0


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="simpler-benchmarks-")


@functools.cache
def missing() -> str | None:
    """Why there is no floor; None when there is one."""
    compiler = _compiler()
    return None if shutil.which(compiler[0]) else f"no C++ compiler {compiler[0]!r}"


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX") or "c++")


@functools.cache
def _program(name: str) -> str:
    built = str(Path(_folder().name) / name)
    subprocess.run(
        [*_compiler(), "-std=c++20", "-O2", str(_SOURCES / f"{name}.cpp"), "-o", built], check=True
    )
    return built


def _run(program: str, *arguments: object) -> array.array[int]:
    words = [_program(program), *map(str, arguments)]
    done = subprocess.run(words, check=True, capture_output=True, timeout=_TIMEOUT_S)
    samples = array.array("q")
    samples.frombytes(done.stdout)
    return samples


def memcpy(state: str, nbytes: int, count: int) -> Sampler:
    """A sampler of one memcpy into ``"warm"`` or ``"fresh"`` memory (cpp/copies.cpp)."""
    return lambda: list(_run("copies", state, nbytes, count))


def exchanges(
    count: int,
    *,
    modes: tuple[str, ...] = (SPIN, FUTEX),
    pattern: str = "call",
    nbytes: int = 1,
    children: int = 1,
    batch: int = 1,
    pace_s: float = 0.0,
) -> dict[str, Sampler]:
    """Samplers of the bare exchange (cpp/exchange.cpp), in nanoseconds an exchange; none without a compiler.

    Args:
        count: Exchanges to time.
        modes: Ways to wait.
        pattern: ``"call"`` to the children in turn, or ``"broadcast"``.
        nbytes: The payload, each way.
        children: Processes that answer.
        batch: Above 1, a sample is the mean of that many exchanges, and there are as many fewer samples.
        pace_s: Sleep before each sample.
    """

    def sampler(mode: str) -> Sampler:
        def take() -> list[float]:
            word = "spin" if mode == SPIN else "futex"
            samples = _run(
                "exchange",
                word,
                pattern,
                nbytes,
                children,
                max(1, count // batch),
                batch,
                round(pace_s * 1e9),
            )
            return [elapsed / batch for elapsed in samples]

        return take

    return {} if missing() else {mode: sampler(mode) for mode in modes}


def skipped() -> dict[str, str]:
    """The reason why there is no floor, as a row reports it."""
    reason = missing()
    return {} if reason is None else {"bare C++": reason}
