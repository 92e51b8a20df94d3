"""The Worker that the families measure, with its handlers and kernels."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

import simpler
from simpler import Worker

if TYPE_CHECKING:
    from collections.abc import Iterator

_KERNELS = """
#define _POSIX_C_SOURCE 200809L
#include <simpler/kernel.h>
#include <time.h>

int noop(const simpler_kernel_args *args) { (void)args; return 0; }

int busy(const simpler_kernel_args *args) {
  struct timespec start, now;
  clock_gettime(CLOCK_MONOTONIC, &start);
  do {
    clock_gettime(CLOCK_MONOTONIC, &now);
  } while ((double)(now.tv_sec - start.tv_sec) + 1e-9 * (double)(now.tv_nsec - start.tv_nsec) <
           args->scalars[0].v.f);
  return 0;
}
"""

_blobs: dict[int, bytes] = {}


def blob(nbytes: int) -> bytes:
    """Bytes whose pages are there (bytes(n) would be pages of zeros that nobody has written)."""
    if nbytes not in _blobs:
        _blobs[nbytes] = b"\x5a" * nbytes
    return _blobs[nbytes]


def echo(_chip: object, payload: bytes, _device: int) -> bytes:
    """The no-op handler: the payload comes back."""
    return payload


def sink(_chip: object, _payload: bytes, _device: int) -> bytes:
    """Takes a large request and replies with nothing."""
    return b""


def source(_chip: object, payload: bytes, _device: int) -> bytes:
    """Replies with as many bytes as the request says in digits; they are made at the first call."""
    return blob(int(payload))


def hang(_chip: object, _payload: bytes, _device: int) -> bytes:
    """Runs until it is killed."""
    time.sleep(3600)
    return b""


for _handler in (echo, sink, source, hang):
    simpler.register_chip_control_extension(f"benchmark-{_handler.__name__}", _handler)


def kernel(symbol: str) -> simpler.NativeKernel:
    """``noop``, or ``busy`` for as many seconds as its scalar says."""
    return simpler.compile_kernel(_KERNELS, symbol)


@contextlib.contextmanager
def tree(chips: int = 1, *, sub_workers: int = 0) -> Iterator[Worker]:
    """A node of `chips` cpu chips with the defaults of a Worker."""
    with Worker(level=3, device_ids=range(chips), num_sub_workers=sub_workers) as worker:
        yield worker


def names(worker: Worker, **more: object) -> dict[str, Any]:
    """The variables of a statement that calls `worker`."""
    return {"w": worker, "PING": simpler.ControlOp.PING, **more}
