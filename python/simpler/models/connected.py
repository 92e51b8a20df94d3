"""One model on two chips, whose key-value cache a KV connector moves from the first to the second.

A connector with a store may have blocks of a prompt already: the first chip loads those and computes the
tokens after them. It always computes the last token, whose logits choose the first of the answer. What the
second chip could not load it computes itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from simpler.kv import (
    BlockNamespace,
    KVConnectorFactory,
    KVRequest,
    KVRequestState,
    KVRuntime,
    KVTransferConfig,
    hash_blocks,
    register,
)
from simpler.models.launches import Span
from simpler.models.layout import BLOCK_TOKENS, FLOAT_BYTES
from simpler.models.split import TwoChipModel

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from simpler import Tensor
    from simpler.kv import KVRecompute
    from simpler.models.graph_model import Chip
    from simpler.models.layout import FloatArray
    from simpler.models.llama import Llama

_log = logging.getLogger("simpler.models")
_LAYOUT = "[key or value][kv head][token][head]"
_LOADING = (KVRequestState.PENDING, KVRequestState.LOADING)
_ASK_S = 60.0
_PAUSE_S = 1e-4
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class BlockMove:
    """Blocks that a connector brought to a chip.

    Attributes:
        tokens: How many tokens' keys and values they hold, at most.
        copies: Blocks of all layers together.
        nbytes: Their bytes.
        wall_s: What it took as the parent saw it: asking, loading and, towards the second chip, saving.
    """

    tokens: int
    copies: int
    nbytes: int
    wall_s: float


class ConnectedModel(TwoChipModel):
    """See the module. Each chip is an engine of its own: the first both loads and saves, the second loads.

    Args:
        model: The whole model.
        connector: A name that ``KVConnectorFactory`` knows.
        namespace: What blocks must have in common to be shared, of blocks of ``BLOCK_TOKENS`` tokens; see
            ``block_namespace``.
        options: The connector's own.
        module_path: Where the connector's class is, when ``connector`` names one instead.

    Raises:
        ConfigError: There is no such connector.
        ValueError: The namespace has blocks of another size.

    Attributes:
        found: Blocks of the last prompt that the first chip loaded; no tokens when none were known.
        moved: Blocks of the last prompt that the second chip loaded.
    """

    def __init__(
        self,
        model: Llama,
        connector: str,
        namespace: BlockNamespace,
        options: Mapping[str, Any] | None = None,
        module_path: str | None = None,
    ) -> None:
        if namespace.block_size != BLOCK_TOKENS:
            raise ValueError(f"blocks have {BLOCK_TOKENS} tokens, not {namespace.block_size}")
        config = KVTransferConfig(
            connector,
            kv_connector_extra_config=options or {},
            kv_connector_module_path=module_path,
            kv_load_failure_policy="recompute",
        )
        KVConnectorFactory.find(config)
        self.connector = connector
        self.found = self.moved = BlockMove(0, 0, 0, 0.0)
        self._namespace = namespace
        self._configs = (
            dataclasses.replace(config, kv_role="kv_both", engine_id=f"prefill {config.engine_id}"),
            dataclasses.replace(config, kv_role="kv_consumer", engine_id=f"decode {config.engine_id}"),
        )
        self._numbers = itertools.count(1)
        self._engines = contextlib.ExitStack()
        self._producer: KVRuntime
        self._consumer: KVRuntime
        self._sequence: str | None = None
        self._moves: list[Span] = []
        register()
        super().__init__(model)

    def __exit__(self, *exc_info: object) -> None:
        try:
            self._engines.close()
        finally:
            super().__exit__(*exc_info)

    def _start(self) -> None:
        super()._start()
        graph = functools.partial(self._prefill_step, reads_prompt=False)
        self._rest, self._rest_tasks = self._capture(graph, {"start": 0, "count": 1})
        try:
            self._producer, self._consumer = (
                self._start_engine(config, chip)
                for config, chip in zip(self._configs, self.chips, strict=True)
            )
            self._consumer.connect(self._producer)
        except BaseException:
            self._engines.close()
            raise

    def _start_engine(self, config: KVTransferConfig, chip: Chip) -> KVRuntime:
        # The first touch of memory costs a page fault; later moves cost the copies alone.
        self.worker.copy_to(chip.cache, np.zeros(self._model.kv.size, np.float32))
        engine = KVRuntime(self.worker, config, block_size=BLOCK_TOKENS, chips=[chip.number])
        self._engines.enter_context(engine)
        engine.register_kv_caches(self._cache_tensors(chip))
        return engine

    def _cache_tensors(self, chip: Chip) -> dict[str, Tensor]:
        kv = self._model.kv
        shape = (kv.blocks, kv.block_size)
        return {
            f"layer {layer}": chip.cache.tensor(shape, np.float32, offset=layer * kv.layer_size * FLOAT_BYTES)
            for layer in range(kv.layers)
        }

    @property
    def is_exact(self) -> bool:
        """Whether the last prompt was computed at once, so that each bit is that of one process.

        Products of matrices of other shapes may add in another order.
        """
        return not self.found.tokens and not any(launch.name == "rest" for launch in self.launches)

    @property
    def spans(self) -> list[Span]:
        """As of every such model, and the moves of the cache, by the time they began."""
        return sorted([*super().spans, *self._moves], key=lambda span: span.start_s)

    @property
    def prompt_s(self) -> float:
        """Seconds of the launches that computed tokens of the last prompt."""
        return sum(launch.duration_s for launch in self.launches if launch.name != "decode")

    def read_prompt(self, prompt: Sequence[int]) -> FloatArray:
        """Start a sequence and move its cache; otherwise as ``GraphModel.read_prompt``.

        Raises:
            KVLoadError: Blocks were not loaded and cannot be computed, since a peer may still write there.
        """
        self._begin_sequence(prompt)
        self._end_sequence()
        self._moves.clear()
        self._sequence = f"prompt {next(self._numbers)}"
        names = name_blocks(self._namespace, prompt)
        request = KVRequest(
            self._sequence,
            # The last block, filled in part, has a name too: to connectors every prompt is whole blocks.
            len(names) * BLOCK_TOKENS,
            block_hashes=names,
            kv_transfer_params={"do_remote_decode": True},
        )
        blocks = range(len(names))
        whole_blocks_before_last = (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        self.found = self._load(self._producer, request, whole_blocks_before_last, "load cache")
        self._producer.step({request.request_id: request.num_tokens - self.found.tokens})
        self._launch_prompt("prefill", self._prefill, self._prefill_tasks, prompt, self.found.tokens)
        start = time.perf_counter()
        self._producer.step()
        _, params = self._producer.request_finished(request, blocks)
        if params is None:
            self._producer.drain()
        offered = dataclasses.replace(request, kv_transfer_params=params)
        self.moved = self._load(self._consumer, offered, request.num_tokens, "move cache", start)
        if self.moved.tokens < len(prompt):
            self._launch_prompt("rest", self._rest, self._rest_tasks, prompt, self.moved.tokens)
        return self._logits_array()

    def measure_prompt_s(self, prompt: Sequence[int]) -> float:
        """Have the first chip compute all of a prompt, and give the seconds that takes. Ends the sequence."""
        self._end_sequence()
        self._launch_prompt("prefill", self._prefill, self._prefill_tasks, prompt)
        return self.launches.pop().duration_s

    def _end_sequence(self) -> None:
        """No connector touches the blocks of the sequence after this."""
        if self._sequence is not None:
            for engine in (self._consumer, self._producer):
                engine.abort(self._sequence)
                engine.drain()
            self._sequence = None

    def _load(
        self, engine: KVRuntime, request: KVRequest, most: int, name: str, start: float | None = None
    ) -> BlockMove:
        """Load what the connector has of the first ``most`` tokens, in whole blocks."""
        start = time.perf_counter() if start is None else start
        tokens = min(self._ask(engine, request), most) // BLOCK_TOKENS * BLOCK_TOKENS
        engine.update_state_after_alloc(request, range(request.num_tokens // BLOCK_TOKENS), tokens)
        if tokens:
            tokens = self._await_load(engine, request.request_id, tokens)
        wall_s = time.perf_counter() - start
        if tokens:
            self._moves.append(Span(name, engine.chips[0], start, wall_s))
        copies = self._model.kv.layers * tokens // BLOCK_TOKENS
        return BlockMove(tokens, copies, copies * self._model.kv.block_bytes, wall_s)

    def _ask(self, engine: KVRuntime, request: KVRequest) -> int:
        deadline = time.monotonic() + _ASK_S
        while time.monotonic() < deadline:
            tokens, _ = engine.get_num_new_matched_tokens(request)
            if tokens is not None:
                return tokens
            self._step_both()
        _log.warning("the KV connector %r never said what it has of a prompt", self.connector)
        return 0

    def _await_load(self, engine: KVRuntime, request_id: str, tokens: int) -> int:
        """How many tokens are there in the end."""
        recompute: KVRecompute | None = None
        other = self._producer if engine is self._consumer else self._consumer
        output = engine.step()
        while True:
            if request_id in output.failed:
                raise output.failed[request_id]
            recompute = output.recompute.get(request_id, recompute)
            if engine.state(request_id) not in _LOADING:
                break
            time.sleep(_PAUSE_S)
            other.step()
            output = engine.step()
        if recompute is None:
            return tokens
        _log.warning(
            "from token %d on a prompt is computed: %s", recompute.num_computed_tokens, recompute.error
        )
        if recompute.replace:
            raise recompute.error
        return recompute.num_computed_tokens

    def _step_both(self) -> None:
        time.sleep(_PAUSE_S)
        self._producer.step()
        self._consumer.step()


def name_blocks(namespace: BlockNamespace, prompt: Sequence[int]) -> list[bytes]:
    """Names of all blocks of a prompt; the last, if filled in part, is named by the tokens it has."""
    names = hash_blocks(namespace, prompt)
    rest = prompt[len(names) * namespace.block_size :]
    if rest:
        part = dataclasses.replace(
            namespace, block_size=len(rest), extra=f"{namespace.extra}, filled in part"
        )
        names += hash_blocks(part, rest, parent=names[-1] if names else None)
    return names


def block_namespace(path: str | os.PathLike[str]) -> BlockNamespace:
    """The namespace of a model file: of its name and its content, which is read for that.

    Raises:
        OSError: It cannot be read.
    """
    state = hashlib.blake2b(digest_size=16)
    with Path(path).open("rb") as file:
        while data := file.read(_READ_BYTES):
            state.update(data)
    return BlockNamespace(Path(path).name, state.hexdigest(), "float32", BLOCK_TOKENS, _LAYOUT)
