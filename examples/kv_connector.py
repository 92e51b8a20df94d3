"""A KV connector: blocks as files of a folder, named by the tokens that they hold the keys and values of.

One engine computes a prompt and saves its blocks; another, on another chip, loads them instead of computing.
"""

# ruff: noqa: ARG002 - the hooks have the arguments that they have

from __future__ import annotations

import itertools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from simpler import Worker, kv

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Plan(kv.KVConnectorMetadata):
    """What the chips do in a step: names of blocks, and where they are in the caches."""

    loads: list[tuple[str, int]]
    saves: list[tuple[str, int]]


class FolderConnector(kv.KVConnector):
    """One class for both roles: first what runs in the chips' processes, then what the scheduler asks."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.folder = Path(self.config.kv_connector_extra_config["folder"])
        self.caches: Mapping[str, kv.KVCacheView] = {}
        self.bad: set[int] = set()
        self.names: dict[str, tuple[list[str], int]] = {}  # of blocks; tokens computed before the load
        self.blocks: dict[str, Sequence[int]] = {}
        self.loads: list[tuple[str, int]] = []

    def register_kv_caches(self, kv_caches: Mapping[str, kv.KVCacheView]) -> None:
        self.caches = kv_caches

    def start_load_kv(self) -> None:
        for name, block in self.connector_metadata.loads:
            if not all(self.load(name, block, layer) for layer in self.caches):
                self.bad.add(block)  # the runtime fails the request, or has it computed

    def load(self, name: str, block: int, layer: str) -> bool:
        try:
            self.caches[layer].write_block(block, self.file(name, layer).read_bytes())
        except (OSError, ValueError):
            return False
        return True

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass  # start_load_kv returns when all is there

    def save_kv_layer(self, layer_name: str, kv_layer: kv.KVCacheView) -> None:
        for name, block in self.connector_metadata.saves:
            self.file(name, layer_name).write_bytes(kv_layer.read_block(block))

    def wait_for_save(self) -> None:
        for name, _ in self.connector_metadata.saves:
            self.file(name, "all").touch()  # last: without it the block is not there

    def get_block_ids_with_load_errors(self) -> Collection[int]:
        bad, self.bad = self.bad, set()
        return bad

    def file(self, name: str, layer: str, rank: int | None = None) -> Path:
        return self.folder / f"{name}.{self.context.rank if rank is None else rank}.{layer}"

    def has(self, name: str) -> bool:
        return all(self.file(name, "all", rank).exists() for rank in range(self.context.num_ranks))

    def get_num_new_matched_tokens(self, request: kv.KVRequest, num_computed_tokens: int) -> tuple[int, bool]:
        names = [block.hex() for block in request.block_hashes]
        self.names[request.request_id] = names, num_computed_tokens
        found = len(list(itertools.takewhile(self.has, names)))
        return max(found * self.context.block_size - num_computed_tokens, 0), False

    def update_state_after_alloc(
        self, request: kv.KVRequest, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        names, computed = self.names[request.request_id]
        self.blocks[request.request_id] = block_ids
        first, last = (n // self.context.block_size for n in (computed, computed + num_external_tokens))
        self.loads += zip(names[first:last], block_ids[first:last], strict=True)

    def build_connector_meta(self, step: kv.KVStep) -> Plan | None:
        pairs = [zip(self.names[key][0], self.blocks[key], strict=False) for key in step.scheduled]
        saves = [pair for pair in itertools.chain(*pairs) if not self.has(pair[0])]
        loads, self.loads = self.loads, []
        return Plan(loads, saves) if loads or saves else None

    def request_finished(self, request: kv.KVRequest, block_ids: Sequence[int]) -> tuple[bool, None]:
        self.names.pop(request.request_id, None)
        self.blocks.pop(request.request_id, None)
        return False, None


def main() -> None:
    """Compute on one chip, load on the other."""
    kv.register()  # before init()
    tokens = np.arange(64)
    hashes = kv.hash_blocks(kv.BlockNamespace("example", "1", "float32", BLOCK_SIZE), tokens)
    request = kv.KVRequest("one", len(tokens), block_hashes=hashes)
    with tempfile.TemporaryDirectory() as folder, Worker(device_ids=[0, 1], hbm_bytes=1 << 20) as worker:
        options = {"folder": folder}
        caches = [worker.malloc(8 * 4096, worker_id=chip).tensor((8, 1024), "float32") for chip in (0, 1)]
        engines = []
        for chip in (0, 1):
            config = kv.KVTransferConfig("FolderConnector", "kv_both", f"engine {chip}", options, __name__)
            engines.append(kv.KVRuntime(worker, config, block_size=BLOCK_SIZE, chips=[chip]))
            engines[chip].register_kv_caches({"layer": caches[chip]})

        first, second = engines
        print("the first engine finds", first.get_num_new_matched_tokens(request)[0], "tokens")
        first.update_state_after_alloc(request, [0, 1, 2, 3])
        first.step({"one": 64})
        worker.copy_to(caches[0], np.random.default_rng(0).random((8, 1024), np.float32))  # the model's work
        first.step()  # ends the step: the blocks are saved
        first.request_finished(request)

        found, _ = second.get_num_new_matched_tokens(request)
        print("the second engine finds", found, "tokens")
        second.update_state_after_alloc(request, [7, 6, 5, 4], found or 0)
        print("loaded:", second.step({"one": 1}).loaded)
        here, there = np.empty((8, 1024), np.float32), np.empty((8, 1024), np.float32)
        worker.copy_from(here, caches[0])
        worker.copy_from(there, caches[1])
        print("equal to the computed blocks:", bool((there[[7, 6, 5, 4]] == here[:4]).all()))
        for engine in engines:
            engine.close()


if __name__ == "__main__":
    main()
