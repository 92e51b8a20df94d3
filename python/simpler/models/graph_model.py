"""A model on chip processes.

Reading a prompt and writing a token are captured graphs, launched again and again with other tokens
and positions. How the model is split is for the classes made from this.
"""

from __future__ import annotations

import abc
import itertools
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from simpler import IN, INOUT, OUT, ControlOp, Worker
from simpler.models.generation import choose_tokens
from simpler.models.kernels import Kernels, register_kernels
from simpler.models.launches import Launch, Span, StagedTasks, clock_bytes, typical
from simpler.models.layout import FLOAT_BYTES, FloatArray
from simpler.models.llama import Llama
from simpler.models.shard import Shard, cut_chunks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from typing_extensions import Self

    from simpler import Buffer, CapturedGraph, Domain, Tensor
    from simpler.models.checkpoint import WeightChunk
    from simpler.models.sampling import Sampler
    from simpler.orchestrator import Orchestrator
    from simpler.task_args import Tagged

_PINGS = 1000
# Of the parts of a window.
_ALIGNMENT = 256
# Room for the allocator's alignment.
_SLACK_BYTES = 1 << 20
# Streams and shares of a prompt in a chip's window, at most: one stream, two shares.
_STREAMS = 3
_MAX_TASKS_OF_LAYER = 2
_MAX_OTHER_TASKS = 3


class Chip:
    """What one chip has: its part of the model, in its memory.

    Attributes:
        number: Its id.
        shard: Its part.
        model: Of that part's dimensions.
        kernels: Its kernels.
        cache: Its buffer of keys and values.
    """

    cache: Buffer
    _weights: Buffer

    def __init__(self, number: int, shard: Shard, capacity: int) -> None:
        self.number = number
        self.shard = shard
        self.model = Llama(shard.config, capacity)
        self.kernels: Kernels

    def start(self, worker: Worker) -> None:
        """Allocate its memory."""
        self._weights = worker.malloc(self.model.weights.nbytes, worker_id=self.number)
        self.cache = worker.malloc(self.model.kv.nbytes, worker_id=self.number)

    def load(self, worker: Worker, name: str, tensor: FloatArray) -> None:
        """Copy its part of a tensor of the whole model."""
        mine = self.shard.cut(name, tensor)
        if mine is not None:
            offset = self.model.weights.places[mine[0]].offset * FLOAT_BYTES
            worker.copy_to(self._weights, np.ascontiguousarray(mine[1]), dst_offset=offset)

    def weights(self) -> Tagged:
        """All weights, to be read."""
        return IN(self._weights.tensor((self.model.weights.size,), np.float32))

    def caches(self, layers: range) -> Tagged:
        """The caches of some of its layers, counted from its first, to be extended."""
        size = self.model.kv.layer_size
        offset = layers.start * size * FLOAT_BYTES
        return INOUT(self.cache.tensor((len(layers) * size,), np.float32, offset=offset))


@dataclass(frozen=True)
class Step:
    """A forward pass that is being captured. Scalars may be placeholders, which only tasks take.

    Attributes:
        orch: Of the capture.
        tasks: Where to submit.
        reads_prompt: Whether the chips that read prompts compute it, or those that write answers.
        rows: Tokens that streams have room for.
        start: Position of the first token.
        count: How many tokens.
        embed: Submits the task that fills the stream of a chip with the embedded tokens.
    """

    orch: Orchestrator
    tasks: StagedTasks
    reads_prompt: bool
    rows: int
    start: Any
    count: Any
    embed: Callable[[Chip, Tensor], None]

    def allocate(self, chips: Sequence[Chip], *parts: str) -> Domain:
        """A window of these chips with room for streams of these names in each."""
        shape = (self.rows, chips[0].shard.whole.embedding)
        size = -(-math.prod(shape) * FLOAT_BYTES // _ALIGNMENT) * _ALIGNMENT
        numbers = [chip.number for chip in chips]
        layout = dict.fromkeys(parts, (shape, np.float32))
        return self.orch.allocate_domain("streams", numbers, len(parts) * size, layout)


class GraphModel(abc.ABC):
    """A model on chip processes. Enter it to start them; leaving it ends them.

    Not thread-safe; one sequence at a time.

    Args:
        model: The whole model; its capacity bounds prompt and answer together.
        shards: What each chip holds.

    Attributes:
        worker: The node.
        chips: Its chips.
        launches: What the graphs have done for the current sequence, in order.
    """

    def __init__(self, model: Llama, shards: Sequence[Shard]) -> None:
        self._model = model
        self.chips = [Chip(number, shard, model.kv.capacity) for number, shard in enumerate(shards)]
        self.launches: list[Launch] = []
        window = _STREAMS * model.kv.capacity * model.config.embedding * FLOAT_BYTES
        needed = max(chip.model.weights.nbytes + chip.model.kv.nbytes for chip in self.chips)
        self.worker = Worker(
            level=3,
            device_ids=list(range(len(self.chips))),
            # A window for each of the two graphs.
            hbm_bytes=needed + 2 * window + _SLACK_BYTES,
        )
        for chip in self.chips:
            chip.kernels = register_kernels(self.worker, chip.model, chip.shard)

    @abc.abstractmethod
    def _record(self, step: Step) -> None:
        """Submit the tasks of one forward pass; the last of them write the logits."""

    def __enter__(self) -> Self:
        self.worker.init()
        try:
            self._start()
        except BaseException:
            self.worker.close()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.worker.close()

    def _start(self) -> None:
        for chip in self.chips:
            chip.start(self.worker)
        self._tokens = self.worker.create_buffer(self._model.kv.capacity * FLOAT_BYTES)
        self._logits = self.worker.create_buffer(self._model.config.vocabulary * FLOAT_BYTES)
        self._prefill, self._prefill_tasks = self._capture(self._prefill_step, {"start": 0, "count": 1})
        self._decode, self._decode_tasks = self._capture(self._decode_step, {"token": 0, "position": 0})

    def _capture(
        self, step: Callable[..., Step], args: Mapping[str, int]
    ) -> tuple[CapturedGraph, StagedTasks]:
        most = len(self.chips) * (_MAX_TASKS_OF_LAYER * self._model.config.layers + _MAX_OTHER_TASKS)
        clocks = self.worker.create_buffer(clock_bytes(most))
        captured: list[StagedTasks] = []

        def orchestrate(orch: Orchestrator, args: Mapping[str, Any], _config: object) -> None:
            tasks = StagedTasks(orch, clocks)
            self._record(step(orch, tasks, **args))
            captured.append(tasks)

        return self.worker.capture(orchestrate, args), captured[0]

    def _prefill_step(
        self, orch: Orchestrator, tasks: StagedTasks, start: Any, count: Any, *, reads_prompt: bool = True
    ) -> Step:
        capacity = self._model.kv.capacity
        prompt = IN(self._tokens.tensor((capacity,), np.int32))

        def embed(chip: Chip, stream: Tensor) -> None:
            kernel = chip.kernels.embed_prompt
            tasks.submit(kernel, chip.weights(), prompt, OUT(stream), count, chip=chip.number)

        return Step(
            orch, tasks, reads_prompt=reads_prompt, rows=capacity, start=start, count=count, embed=embed
        )

    def _decode_step(self, orch: Orchestrator, tasks: StagedTasks, token: Any, position: Any) -> Step:
        def embed(chip: Chip, stream: Tensor) -> None:
            tasks.submit(chip.kernels.embed_token, chip.weights(), OUT(stream), token, chip=chip.number)

        return Step(orch, tasks, reads_prompt=False, rows=1, start=position, count=1, embed=embed)

    def load(self, chunks: Iterable[WeightChunk]) -> Iterator[int]:
        """Copy to each chip its weights, yielding the bytes of each chunk done.

        Nothing is loaded unless the iterator is used up.

        Raises:
            ValueError: a chunk has a part of a tensor only.
        """
        for chunk, tensors in cut_chunks(self._model.weights, chunks):
            for name, tensor in tensors:
                for chip in self.chips:
                    chip.load(self.worker, name, tensor)
            yield chunk.data.nbytes

    def generate(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        end_of_turn: int,
        sampler: Sampler | None = None,
        observe: Callable[[FloatArray], None] | None = None,
    ) -> Iterator[int]:
        """Yield tokens that follow the prompt: where no sum is split, those of ``generation.generate``.

        Args:
            prompt: Token ids, at least one.
            max_tokens: Most tokens to yield; stops earlier when the cache is full.
            end_of_turn: Token that ends the answer, and is not yielded.
            sampler: ``None`` takes the likeliest token each time.
            observe: Gets the logits that each token is chosen from, valid during the call.

        Raises:
            ValueError: the prompt is empty or longer than the model's capacity.
            SimplerError: a chip failed.
        """

        def shown(logits: FloatArray) -> FloatArray:
            if observe is not None:
                observe(logits)
            return logits

        def decode(token: int, position: int) -> FloatArray:
            return shown(self.write_token(token, position))

        yield from choose_tokens(
            shown(self.read_prompt(prompt)),
            decode,
            positions=range(len(prompt), self._model.kv.capacity),
            max_tokens=max_tokens,
            end_of_turn=end_of_turn,
            sampler=sampler,
        )

    def read_prompt(self, prompt: Sequence[int]) -> FloatArray:
        """Start a sequence; the logits of the token after the prompt, valid until the next call.

        Raises:
            ValueError: the prompt is empty or longer than the model's capacity.
        """
        self._begin_sequence(prompt)
        self._launch_prompt("prefill", self._prefill, self._prefill_tasks, prompt)
        return self._logits_array()

    def write_token(self, token: int, position: int) -> FloatArray:
        """Extend the sequence by a token; the logits of the next, valid until the next call."""
        self._launch("decode", self._decode, self._decode_tasks, token=token, position=position)
        return self._logits_array()

    @property
    def prompt_chips(self) -> Sequence[Chip]:
        """Those that read the prompt."""
        return self.chips

    @property
    def answer_chips(self) -> Sequence[Chip]:
        """Those that write the answer."""
        return self.chips

    def _begin_sequence(self, prompt: Sequence[int]) -> None:
        capacity = self._model.kv.capacity
        if not 1 <= len(prompt) <= capacity:
            raise ValueError(f"a prompt of {len(prompt)} tokens does not fit a cache of {capacity}")
        self.launches.clear()

    def _launch_prompt(
        self, name: str, graph: CapturedGraph, tasks: StagedTasks, prompt: Sequence[int], start: int = 0
    ) -> None:
        """Compute the tokens from position ``start`` on."""
        count = len(prompt) - start
        self._tokens.array((count,), np.int32)[...] = prompt[start:]
        self._launch(name, graph, tasks, start=start, count=count)

    def _launch(self, name: str, graph: CapturedGraph, tasks: StagedTasks, **bindings: Any) -> None:
        start = time.perf_counter()
        graph.launch(**bindings).result()
        end = time.perf_counter()
        self.launches.append(Launch(name, start, end, tasks, tasks.read_clocks()))

    @property
    def spans(self) -> list[Span]:
        """What parent and chips have done for the current sequence, in the order of launches."""
        return list(itertools.chain.from_iterable(launch.spans() for launch in self.launches))

    @property
    def tasks_per_token(self) -> int:
        """Tasks of the graph that writes one token."""
        return self._decode.num_tasks

    @property
    def time_per_token_s(self) -> float | None:
        """Median time of the launches that wrote a token; None when none did."""
        return typical(launch.duration_s for launch in self.launches if launch.name == "decode")

    @property
    def overhead_per_token_s(self) -> float | None:
        """Median of ``Launch.overhead_s`` of the same launches."""
        return typical(launch.overhead_s for launch in self.launches if launch.name == "decode")

    def control_round_trip_s(self) -> float:
        """Median time of an empty control call to the last chip, answered in C++."""
        times = []
        for _ in range(_PINGS):
            start = time.perf_counter()
            self.worker.control_payload(len(self.chips) - 1, ControlOp.PING)
            times.append(time.perf_counter() - start)
        return float(np.median(times))

    def _logits_array(self) -> FloatArray:
        return self._logits.array((self._model.config.vocabulary,), np.float32)

    def _logits_tensor(self, tokens: range) -> Tagged:
        offset = tokens.start * FLOAT_BYTES
        return OUT(self._logits.tensor((len(tokens),), np.float32, offset=offset))
