"""Gates: where a handler or a kernel in a child waits until the test lets it go on."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import simpler

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from typing_extensions import Self

NATIVE_SOURCE = r"""
#include <fcntl.h>
#include <signal.h>
#include <simpler/kernel.h>
#include <unistd.h>
int wait_at_gate(const simpler_kernel_args *a) {
  char byte;
  int fd = open((const char *)a->tensors[0].data, O_RDONLY);
  if (fd < 0) return 1;
  while (read(fd, &byte, 1) > 0) continue;
  close(fd);
  return 0;
}
static int touch(const simpler_kernel_args *a) {
  int fd = open((const char *)a->tensors[0].data, O_RDONLY);
  return fd;
}
int spin_for_ever(const simpler_kernel_args *a) {
  if (a->num_tensors) touch(a);
  for (volatile int on = 1; on;) continue;
  return 0;
}
int ignore_sigterm_for_ever(const simpler_kernel_args *a) {
  signal(SIGTERM, SIG_IGN);
  if (a->num_tensors) touch(a);
  for (;;) pause();
  return 0;
}
int crash(const simpler_kernel_args *a) {
  (void)a;
  *(volatile int *)0 = 1;
  return 0;
}
int nothing(const simpler_kernel_args *a) { (void)a; return 0; }
"""


class Gate:
    """A fifo: whoever opens it for reading waits until the test has opened and closed the other end."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path
        self._writer = -1

    @property
    def name(self) -> bytes:
        """What `wait_at` takes."""
        return os.fsencode(self.path)

    def wait_reached(self) -> None:
        """Return when someone waits here."""
        self._writer = os.open(self.path, os.O_WRONLY)

    def open(self) -> None:
        """Let it go on. REQUIRES: wait_reached() has returned."""
        writer, self._writer = self._writer, -1
        os.close(writer)

    def __enter__(self) -> Self:
        self.wait_reached()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer >= 0:
            self.open()


def wait_at(name: bytes) -> None:
    """Wait at the gate of that name, without the GIL; in a child."""
    with open(name, "rb") as fifo:  # noqa: PTH123 - bytes as they came
        fifo.read()


def wait_handler(_chip: simpler.ChipView, payload: bytes, _device: int) -> bytes:
    """An extension that waits at the gate named by the payload; without a payload it replies at once."""
    if payload:
        wait_at(payload)
    return b"done"


def native(symbol: str) -> simpler.NativeKernel:
    """One of the kernels above."""
    return simpler.compile_kernel(NATIVE_SOURCE, symbol)


def gate_args(worker: simpler.Worker, gate: Gate) -> simpler.TaskArgs:
    """The arguments with which a native kernel above waits at, or opens, the gate."""
    text = gate.name + b"\0"
    buffer = worker.create_buffer(len(text))
    memoryview(buffer)[:] = text
    return simpler.TaskArgs().add_tensor(buffer.tensor((len(text),), "uint8"), simpler.Tag.IN)
