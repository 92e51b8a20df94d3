"""One BLAS and OpenMP thread in children, unless the user said otherwise.

The environment is read when a library loads and a child inherits libraries loaded, so their own setters
are called for those, and the variables are set for what is loaded later.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from typing import Any, TypeAlias

from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]  # it ships no types

_VARIABLES = {
    "openblas": ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS"),
    "mkl": ("MKL_NUM_THREADS", "OMP_NUM_THREADS"),
    "blis": ("BLIS_NUM_THREADS", "OMP_NUM_THREADS"),
    "flexiblas": ("FLEXIBLAS_NUM_THREADS", "OMP_NUM_THREADS"),
    "openmp": ("OMP_NUM_THREADS",),
}
_FOR_LATER = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
Controller: TypeAlias = ThreadpoolController

_found: tuple[int, ThreadpoolController] | None = None


def prepare() -> ThreadpoolController:
    """Find the loaded libraries; in the parent before the fork, since it takes milliseconds."""
    global _found  # noqa: PLW0603 - a cache of the process, which libraries are loaded being its property
    modules = len(sys.modules)
    if _found is None or _found[0] != modules:
        _found = (modules, ThreadpoolController())
    return _found[1]


def _shrink_pool(library: Any) -> None:
    """Keep OpenBLAS's setter from starting a pool as large as the parent's, which it does after a fork.

    The size is a variable that the library exports; where it does not, the threads start and sleep.
    """
    if library.internal_api == "openblas":
        with contextlib.suppress(ValueError):  # no such symbol
            ctypes.c_int.in_dll(library.dynlib, "blas_num_threads").value = 1


def limit_to_one(controller: ThreadpoolController) -> None:
    """In a child: one thread for each library whose number the user has not set."""
    for library in controller.lib_controllers:
        names = _VARIABLES.get(library.internal_api, _VARIABLES.get(library.user_api, ()))
        if not any(os.environ.get(name) for name in names) and library.num_threads != 1:
            _shrink_pool(library)
            library.set_num_threads(1)
    if not os.environ.get("OMP_NUM_THREADS"):  # the others follow it when their own is not set
        for name in _FOR_LATER:
            os.environ.setdefault(name, "1")
