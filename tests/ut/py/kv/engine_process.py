"""A process with a transfer engine in it, which the tests of engines tell what to do.

An engine opened in the process of the tests would hang in every child forked from it later, so each has a
process of its own. Commands are lines of JSON and run in a thread each: a reply may overtake another.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from simpler import SimplerError
from simpler.kv.engines import Copy, OutcomeKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from typing_extensions import Self

    from simpler.kv.engines import TransferEngine

FOLDER_OF_TESTS = Path(__file__).parents[1]
WATCHDOG_S = 60.0


class RemoteFailureError(Exception):
    """An exception in the engine's process; the text begins with its type."""


class Memory(NamedTuple):
    """A range in the engine's process."""

    address: int
    nbytes: int

    def part(self, offset: int, nbytes: int) -> Memory:
        return Memory(self.address + offset, nbytes)


class Read(NamedTuple):
    """How a transfer ended, and what waiting for it took."""

    kind: OutcomeKind
    message: str
    transfer: int
    elapsed_s: float
    cpu_s: float


def pattern(seed: int, nbytes: int) -> NDArray[np.uint8]:
    """Bytes that differ from place to place and from seed to seed."""
    return np.random.default_rng(seed).integers(1, 256, nbytes, dtype=np.uint8)


class EngineProcess:
    """The tests' side."""

    def __init__(self, engine: str, **options: object) -> None:
        self._numbers = itertools.count()
        self._replies: dict[int, Any] = {}
        self._arrived = threading.Condition()
        environment = dict(os.environ)
        environment["PYTHONPATH"] = f"{FOLDER_OF_TESTS}:{environment.get('PYTHONPATH', '')}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kv.engine_process", engine, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            text=True,
        )
        self._reader = threading.Thread(target=self._read_replies, daemon=True)
        self._reader.start()

    def _read_replies(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            reply = json.loads(line)  # fails if the engine writes to standard output
            with self._arrived:
                self._replies[reply["number"]] = reply
                self._arrived.notify_all()
        with self._arrived:
            self._replies[-1] = None
            self._arrived.notify_all()

    def start(self, command: str, *arguments: object) -> int:
        """Tell it something, and go on."""
        number = next(self._numbers)
        assert self.process.stdin is not None
        self.process.stdin.write(
            json.dumps({"number": number, "command": command, "arguments": arguments}) + "\n"
        )
        self.process.stdin.flush()
        return number

    def has_replied(self, number: int) -> bool:
        with self._arrived:
            return number in self._replies

    def finish(self, number: int) -> Any:
        """Wait for the reply."""
        with self._arrived:
            arrived = self._arrived.wait_for(lambda: {number, -1} & self._replies.keys(), WATCHDOG_S)
            assert arrived, f"no reply within {WATCHDOG_S} s"
            reply = self._replies.get(number)
        if reply is None:
            raise RemoteFailureError(f"the process has ended: {self.process.wait()}")
        if "error" in reply:
            raise RemoteFailureError(reply["error"])
        return reply["result"]

    def call(self, command: str, *arguments: object) -> Any:
        return self.finish(self.start(command, *arguments))

    def allocate(self, nbytes: int, seed: int = 0) -> Memory:
        """Memory with a pattern in it, zeros for seed 0."""
        return Memory(self.call("allocate", nbytes, seed), nbytes)

    def registered(self, nbytes: int, seed: int = 0) -> Memory:
        memory = self.allocate(nbytes, seed)
        assert self.call("register", *memory)
        return memory

    def start_read(
        self, peer: str, copies: list[tuple[Memory, Memory]], timeout_s: float = 30.0, verb: str = "read"
    ) -> int:
        """Begin to copy; each pair is the memory here and the memory at the peer."""
        plain = [(here.address, there.address, here.nbytes) for here, there in copies]
        return self.start(verb, peer, plain, timeout_s)

    def finish_read(self, number: int) -> Read:
        kind, *rest = self.finish(number)
        return Read(OutcomeKind(kind), *rest)

    def read(
        self, peer: str, here: Memory, there: Memory, timeout_s: float = 30.0, verb: str = "read"
    ) -> Read:
        return self.finish_read(self.start_read(peer, [(here, there)], timeout_s, verb))

    def holds(self, memory: Memory, seed: int) -> bool:
        """Whether the memory has the pattern from its beginning on."""
        return bool(self.call("holds", *memory, seed))

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        self._reader.join()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.process.stdin.close()
        self.process.stdout.close()
        written = self.process.stderr.read()
        self.process.stderr.close()
        if error[0] is None:
            assert written == "", "engines keep out of the terminal"


def make_engine(name: str, options: dict[str, Any]) -> TransferEngine:
    module, engine = {
        "mooncake": ("simpler.kv.engines.mooncake", "MooncakeEngine"),
        "nixl": ("simpler.kv.engines.nixl", "NixlEngine"),
    }[name]
    if options.get("ports") is not None:
        options["ports"] = tuple(options["ports"])
    made: TransferEngine = getattr(importlib.import_module(module), engine)(**options)
    return made


def refusal(attempt: Callable[[], object]) -> str:
    """What is said when this is tried."""
    try:
        attempt()
    except SimplerError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


class Commands:
    """The engine's side: a method for each command."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self.name = name
        self.engine: Any = make_engine(name, options)
        self.memory: list[NDArray[np.uint8]] = []
        self.cancelled = threading.Event()

    def open(self) -> None:
        self.engine.open()

    def metadata(self) -> str:
        return bytes(self.engine.metadata()).hex()

    def connect(self, metadata: str) -> str:
        return str(self.engine.connect(bytes.fromhex(metadata)))

    def disconnect(self, peer: str) -> None:
        self.engine.disconnect(peer)

    def allocate(self, nbytes: int, seed: int) -> int:
        self.memory.append(pattern(seed, nbytes) if seed else np.zeros(nbytes, np.uint8))
        return int(self.memory[-1].ctypes.data)

    def register(self, address: int, nbytes: int) -> bool:
        return bool(self.engine.register(address, nbytes))

    def unregister(self, address: int, nbytes: int) -> bool:
        return bool(self.engine.unregister(address, nbytes))

    def register_behind_its_back(self, address: int, nbytes: int) -> int:
        return int(self.engine._raw.register_memory(address, nbytes))

    def read(self, *arguments: Any) -> tuple[str, str, int, float, float]:
        return self._move(self.engine.read, *arguments)

    def write(self, *arguments: Any) -> tuple[str, str, int, float, float]:
        return self._move(self.engine.write, *arguments)

    def _move(
        self, move: Any, peer: str, copies: list[list[int]], timeout_s: float
    ) -> tuple[str, str, int, float, float]:
        begun, cpu = time.monotonic(), time.thread_time()
        outcome = move(
            peer, [Copy(*copy) for copy in copies], timeout_s=timeout_s, cancelled=self.cancelled.is_set
        )
        elapsed, cpu = time.monotonic() - begun, time.thread_time() - cpu
        return outcome.kind.value, outcome.message, outcome.transfer, elapsed, cpu

    def cancel(self) -> None:
        self.cancelled.set()

    def go_on(self) -> None:
        self.cancelled.clear()

    def settled(self, transfer: int) -> bool:
        return bool(self.engine.settled(transfer))

    def holds(self, address: int, nbytes: int, seed: int) -> bool:
        wanted = pattern(seed, nbytes) if seed else np.zeros(nbytes, np.uint8)
        return ctypes.string_at(address, nbytes) == wanted.tobytes()

    def close(self) -> bool:
        return bool(self.engine.close())

    def open_in_forked_child(self) -> str:
        """What the engine says when a child forked now opens another, or uses this one."""
        read_end, write_end = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # there are threads, which is the point
            pid = os.fork()
        if pid == 0:
            texts = f"{refusal(make_engine(self.name, {}).open)}\n{refusal(self.engine.metadata)}"
            os.write(write_end, texts.encode())
            os._exit(0)
        os.close(write_end)
        with os.fdopen(read_end) as reader:
            text = reader.read()
        os.wait()
        return text


def main() -> None:
    commands = Commands(sys.argv[1], json.loads(sys.argv[2]))
    writing = threading.Lock()

    def run(line: str) -> None:
        order = json.loads(line)
        reply: dict[str, object] = {"number": order["number"]}
        try:
            reply["result"] = getattr(commands, order["command"])(*order["arguments"])
        except Exception as error:
            reply["error"] = f"{type(error).__name__}: {error}"
        with writing:
            print(json.dumps(reply), flush=True)

    for line in sys.stdin:
        threading.Thread(target=run, args=(line,), daemon=True).start()
    os._exit(0)


if __name__ == "__main__":
    main()
