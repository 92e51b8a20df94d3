"""Native kernels: compiling them, finding them, and where their header is.

A native kernel is ``int kernel(const simpler_kernel_args *)`` of `simpler/kernel.h` in a shared library.

What only the compiling needs is imported there (hashlib alone brings OpenSSL, 4 MiB): each fork and each end
of a child pays for every page of the parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from simpler.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

ABI_VERSION = 1
"""SIMPLER_KERNEL_ABI_VERSION of `simpler/kernel.h`."""

_C_FLAGS = ("-std=c11",)
_CXX_FLAGS = ("-std=c++17",)
_FLAGS = ("-O3", "-fPIC", "-shared")


@dataclass(frozen=True)
class NativeKernel:
    """A function of a shared library with the C ABI of `simpler/kernel.h`. Pickles as its path and name.

    Attributes:
        path: The library, absolute.
        symbol: The function's name in it.
    """

    path: Path
    symbol: str

    @staticmethod
    def load(path: str | os.PathLike[str], symbol: str) -> NativeKernel:
        """A kernel of a built library.

        Raises:
            ConfigError: The library cannot be loaded or has no such symbol.
        """
        kernel = NativeKernel(Path(path).absolute(), symbol)
        kernel.address()
        return kernel

    def address(self) -> int:
        """Where the function is in this process; loads the library (its names stay its own) and keeps it.

        Raises:
            ConfigError: The library cannot be loaded or has no such symbol.
        """
        try:
            library = _library(str(self.path))
        except OSError as error:
            raise ConfigError(f"cannot load the kernel library {self.path}: {error}") from error
        try:
            function = getattr(library, self.symbol)
        except AttributeError as error:
            raise ConfigError(f"{self.path} has no symbol {self.symbol!r}") from error
        address = ctypes.cast(function, ctypes.c_void_p).value
        if address is None:
            raise ConfigError(f"symbol {self.symbol!r} of {self.path} is a null pointer")
        return address


@functools.cache
def _library(path: str) -> ctypes.CDLL:
    return ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_LOCAL)


def get_include() -> str:
    """The directory to give a compiler as ``-I`` for ``#include <simpler/kernel.h>``.

    Raises:
        ConfigError: The header is not where the package was installed.
    """
    here = Path(__file__).resolve().parent
    source_tree = here.parents[1] / "src" / "common" / "hierarchical" / "include"
    for folder in (here / "include", source_tree):
        if (folder / "simpler" / "kernel.h").is_file():
            return str(folder)
    raise ConfigError(f"simpler/kernel.h is not in {here / 'include'}: the package is not installed whole")


def compile_kernel(source: str | os.PathLike[str], symbol: str, *, flags: Sequence[str] = ()) -> NativeKernel:
    """Compile a kernel, or take it from the cache when the same has been compiled before.

    C (c11), or C++17 when the source says ``extern "C"`` or the flags have ``-x c++``. The compiler is
    ``$CC`` or ``cc`` (C++: ``$CXX`` or ``c++``). The cache is ``$SIMPLER_CACHE_DIR/kernels``, else
    ``$XDG_CACHE_HOME/simpler/kernels``, else below ``~/.cache``; its key covers the source, the flags, the
    compiler's version, the header and this processor. Any number of processes may compile the same at once.

    Args:
        source: The program's text, or a path object of a file that has it.
        symbol: The kernel's name in it.
        flags: More flags for compiler and linker, such as ``("-march=native", "-lm")``.

    Raises:
        ConfigError: No compiler, the program does not compile (with the compiler's output), or it does not
            define `symbol`.
    """
    text = source if isinstance(source, str) else Path(source).read_text(encoding="utf-8")
    language, flags = _split_language(flags)
    cxx = language == "c++" or (language is None and 'extern "C"' in text)
    compiler = _compiler(cxx=cxx)
    options = [*(_CXX_FLAGS if cxx else _C_FLAGS), *_FLAGS, f"-I{get_include()}"]
    folder = _cache_folder()
    library = folder / f"{_key(text, compiler, [*options, *flags])}.so"
    if not library.exists():
        _build(text, compiler, options, flags, library)
    return NativeKernel.load(library, symbol)


def _split_language(flags: Sequence[str]) -> tuple[str | None, list[str]]:
    """The language that ``-x`` names, and the other flags: -x has to precede the source, they follow it."""
    language: str | None = None
    rest: list[str] = []
    words = iter(flags)
    for word in words:
        if word.startswith("-x"):
            language = (word[2:] or next(words, "")).strip()
            if language not in ("c", "c++"):
                raise ConfigError(f"a kernel is C or C++, not {language!r}")
        else:
            rest.append(word)
    return language, rest


def _compiler(*, cxx: bool) -> tuple[str, ...]:
    import shlex

    variable, default = ("CXX", "c++") if cxx else ("CC", "cc")
    command = shlex.split(os.environ.get(variable) or default)
    found = shutil.which(command[0])
    if found is None:
        raise ConfigError(f"no compiler {command[0]!r}: install one, or name it in {variable}")
    return (found, *command[1:])


def _cache_folder() -> Path:
    base = os.environ.get("SIMPLER_CACHE_DIR")
    if base:
        folder = Path(base) / "kernels"
    else:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "simpler" / "kernels"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot make the kernel cache {folder} ({error}): set SIMPLER_CACHE_DIR"
        ) from error
    return folder.absolute()


@functools.lru_cache(maxsize=16)
def _version(compiler: tuple[str, ...], _modified_ns: int) -> str:
    import subprocess

    done = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def _key(text: str, compiler: tuple[str, ...], options: Sequence[str]) -> str:
    import hashlib

    header = (Path(get_include()) / "simpler" / "kernel.h").read_bytes()
    version = _version(compiler, Path(compiler[0]).stat().st_mtime_ns)
    digest = hashlib.sha256()
    # -march=native means this processor: a cache on a shared disk must tell processors apart.
    parts = (
        text,
        "\0".join(compiler),
        version,
        "\0".join(options),
        str(ABI_VERSION),
        platform.machine(),
        _cpu(),
    )
    for part in (*(part.encode("utf-8", "surrogateescape") for part in parts), header):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:40]


@functools.cache
def _cpu() -> str:
    wanted = ("model name", "flags", "Features", "CPU part")
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
    return ""


def _build(
    text: str, compiler: tuple[str, ...], options: Sequence[str], flags: Sequence[str], library: Path
) -> None:
    import shlex
    import subprocess

    suffix = ".cpp" if "-std=c++17" in options else ".c"
    with tempfile.TemporaryDirectory(prefix="build-", dir=library.parent) as folder:
        source = Path(folder) / f"kernel{suffix}"
        source.write_text(text, encoding="utf-8")
        built = Path(folder) / "kernel.so"
        # Flags come last: libraries have to follow the source that needs them.
        command = [*compiler, *options, str(source), "-o", str(built), *flags]
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False, stdin=subprocess.DEVNULL
        )
        if done.returncode != 0 or not built.exists():
            raise ConfigError(
                f"the kernel does not compile ({shlex.join(command)}, exit code {done.returncode}):\n"
                f"{done.stderr}{done.stdout}"
            )
        built.replace(library)
