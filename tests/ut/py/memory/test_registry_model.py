"""The registry against a model, in any order of calls."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from memory.registry import PAGE, Node
from simpler.buffers import Buffer, HostBuffer
from simpler.errors import MemoryRangeError
from simpler.memory import HOLD, WRITE, Mode, Use


class RegistryMachine(RuleBasedStateMachine):
    """Buffers, uses and deaths in any order: the chips and the heap hold exactly what the model says."""

    buffers: Bundle[Buffer | HostBuffer] = Bundle("buffers")
    uses: Bundle[Use] = Bundle("uses")

    def __init__(self) -> None:
        super().__init__()
        self.node = Node(heap_bytes=1 << 20)
        self.alive: set[Buffer | HostBuffer] = set()
        self.dying: set[Buffer | HostBuffer] = set()  # freed, waiting for uses
        self.held: dict[Use, list[tuple[Buffer | HostBuffer, int, int, bool]]] = {}

    @initialize()
    def start(self) -> None:
        assert self.node.chips.live == {}

    @rule(target=buffers, worker=st.integers(-1, 1), nbytes=st.integers(1, 3 * PAGE))
    def allocate(self, worker: int, nbytes: int) -> Buffer | HostBuffer:
        registry = self.node.registry
        made = registry.create_buffer(nbytes) if worker < 0 else registry.malloc(worker, nbytes)
        self.alive.add(made)
        return made

    @rule(buffer=buffers)
    def free(self, buffer: Buffer | HostBuffer) -> None:
        if buffer not in self.alive:
            with pytest.raises(MemoryRangeError):
                self.node.registry.free(buffer)
            return
        self.node.registry.free(buffer)
        self.alive.discard(buffer)
        if self._used(buffer):
            self.dying.add(buffer)

    @rule(
        target=uses,
        parts=st.lists(
            st.tuples(buffers, st.floats(0, 1), st.floats(0, 1), st.sampled_from(Mode)),
            max_size=4,
        ),
    )
    def use(self, parts: list[tuple[Buffer | HostBuffer, float, float, Mode]]) -> Any:
        if any(buffer not in self.alive for buffer, *_ in parts):
            buffer = next(buffer for buffer, *_ in parts if buffer not in self.alive)
            with pytest.raises(MemoryRangeError):
                self.node.registry.hold([buffer])
            return multiple()
        ranges, items = [], []
        for buffer, a, b, mode in parts:
            low, high = sorted((math.floor(a * buffer.nbytes), math.floor(b * buffer.nbytes)))
            items.append((buffer.tensor((high - low,), "uint8", offset=low), mode))
            ranges.append((buffer, low, low if mode == HOLD else high, mode == WRITE))
        use = self.node.registry.enqueue(items)
        assert use.granted is not any(self._conflict(ranges, other) for other in self.held.values())
        self.held[use] = ranges
        return use

    @rule(use=consumes(uses))
    def release(self, use: Use) -> None:
        use.release()
        self.held.pop(use, None)
        self.dying = {buffer for buffer in self.dying if self._used(buffer)}

    @rule(worker=st.integers(0, 1))
    def lose(self, worker: int) -> None:
        self.node.registry.worker_lost(worker)
        gone = [key for key in self.node.chips.live if key[0] == worker]
        for key in gone:
            del self.node.chips.live[key]
        self.alive = {b for b in self.alive if isinstance(b, HostBuffer) or b.worker_id != worker}
        self.dying = {b for b in self.dying if isinstance(b, HostBuffer) or b.worker_id != worker}

    @invariant()
    def memory_is_what_the_model_says(self) -> None:
        device = {b for b in self.alive | self.dying if isinstance(b, Buffer)}
        assert self.node.chips.live == {(b.worker_id, b.address): b.nbytes for b in device}
        host = [b for b in self.alive | self.dying if isinstance(b, HostBuffer)]
        assert self.node.heap.used_bytes == sum(-(-b.nbytes // PAGE) * PAGE for b in host)

    def _used(self, buffer: Buffer | HostBuffer) -> bool:
        return any(buffer is used for ranges in self.held.values() for used, *_ in ranges)

    @staticmethod
    def _conflict(a: list[tuple[Any, int, int, bool]], b: list[tuple[Any, int, int, bool]]) -> bool:
        return any(
            x[0] is y[0] and (x[3] or y[3]) and max(x[1], y[1]) < min(x[2], y[2]) for x in a for y in b
        )


RegistryMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestRegistryAgainstAModel = RegistryMachine.TestCase
