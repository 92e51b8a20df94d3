"""A connector that does on each chip what a test's script says, and writes down which hooks were called."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import simpler
from simpler import kv

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

MODULE = __name__
BLOCK_SIZE = 4
BLOCKS = 8
BLOCK_BYTES = 64


@dataclass(frozen=True)
class Script(kv.KVConnectorMetadata):
    """What each rank does in a step: see `ScriptedConnector`."""

    by_rank: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)


class ScriptedConnector(kv.KVConnector):
    """Does what it is told.

    Options: ``log`` (a folder), ``refuse_rank``. A rank's script has ``sent``, ``received``, ``bad``,
    ``raise`` (the name of a hook), ``wait`` (a FIFO to read before the loads are there), ``die``.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.options = self.config.kv_connector_extra_config
        self.told: list[Any] = []
        self.transfers: list[kv.KVTransfer] = []
        self.unconfirmed: set[str] = set()
        self.rejected = ""
        self._sent: list[str] = []
        self._received: list[str] = []
        self._bad: dict[int, str] = {}

    @property
    def script(self) -> Mapping[str, Any]:
        script: Mapping[str, Any] = self.connector_metadata.by_rank.get(self.context.rank, {})
        return script

    def note(self, *what: object) -> None:
        with (Path(self.options["log"]) / str(self.context.rank)).open("a") as file:
            file.write(" ".join(map(str, what)) + "\n")

    def fail_in(self, hook: str) -> None:
        if self.script.get("raise") == hook:
            raise OSError(f"the engine broke in {hook}")

    # On a chip

    def register_kv_caches(self, kv_caches: Mapping[str, kv.KVCacheView]) -> None:
        self.note("register_kv_caches", *kv_caches)
        self.caches = kv_caches
        if self.options.get("refuse_rank") == self.context.rank:
            raise ValueError(
                f"the engine refuses {kv_caches['k'].nbytes} bytes at {kv_caches['k'].address:#x}"
            )

    def unregister_kv_caches(self) -> None:
        self.note("unregister_kv_caches")

    def bind_connector_metadata(self, metadata: kv.KVConnectorMetadata) -> None:
        super().bind_connector_metadata(metadata)
        self.note("bind_connector_metadata")

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self.note("clear_connector_metadata")

    def start_load_kv(self) -> None:
        self.note("start_load_kv")
        self.fail_in("start_load_kv")
        self._sent += self.script.get("sent", [])
        self._received += self.script.get("received", [])
        self._bad |= self.script.get("bad", {})
        if "wait" in self.script:
            Path(self.script["wait"]).read_bytes()
        if "die" in self.script:
            os.abort()

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.note("wait_for_layer_load", layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: kv.KVCacheView) -> None:
        self.note("save_kv_layer", layer_name, kv_layer.name)
        self.fail_in("save_kv_layer")

    def wait_for_save(self) -> None:
        self.note("wait_for_save")

    def get_finished(self, finished_req_ids: Collection[str]) -> tuple[Collection[str], Collection[str]]:
        self.note("get_finished", *sorted(finished_req_ids))
        sent, received = self._sent, self._received
        self._sent, self._received = [], []
        return sent, received

    def get_block_ids_with_load_errors(self) -> Mapping[int, str]:
        self.note("get_block_ids_with_load_errors")
        bad, self._bad = self._bad, {}
        return bad

    def get_handshake_metadata(self) -> bytes:
        self.note("get_handshake_metadata")
        return f"rank {self.context.rank}".encode()

    def get_stats(self) -> Mapping[str, float]:
        return {"rank": self.context.rank or 0}

    def set_handshake_metadata(self, engine_id: str, metadata: Mapping[int, bytes]) -> None:
        self.told.append((engine_id, dict(metadata)))
        self.note("set_handshake_metadata", engine_id, *metadata.values())

    def run_transfer(self, job: kv.KVTransferJob, cancel: simpler.CancelToken) -> None:
        order = job.payload.decode()
        if order.startswith("wait"):
            Path(order[5:]).read_bytes()
        elif order == "cancel":
            cancel.wait(20)
            raise kv.KVTransferError("told to stop")
        elif order == "fail":
            raise kv.KVTransferError("no route to the peer")
        elif order == "open":
            self.unconfirmed.add(job.request_id)
            raise TimeoutError("the peer says nothing")
        for view in job.targets:
            view.array()[:] = 7

    def confirm_transfers(self, request_ids: Sequence[str]) -> Collection[str]:
        if not (Path(self.options["log"]) / "confirm").exists():
            return ()
        return [request_id for request_id in request_ids if request_id in self.unconfirmed]

    def reset_transfers(self) -> None:
        self.note("reset_transfers")

    def shutdown(self) -> None:
        self.note("shutdown")

    # Next to the scheduler

    def get_num_new_matched_tokens(
        self, request: kv.KVRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        params: Any = request.kv_transfer_params or {}
        return params.get("tokens", 0), params.get("beside", False)

    def update_state_after_alloc(
        self, request: kv.KVRequest, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        self.told.append((request.request_id, tuple(block_ids), num_external_tokens))
        params: Any = request.kv_transfer_params or {}
        for rank in range(self.context.num_ranks):
            orders = params.get("transfers", {}).get(rank, [])
            target = kv.KVBlocks(self.config.engine_id, rank, tuple(block_ids))
            self.transfers += [
                kv.KVTransfer(
                    request.request_id, rank, None, target, order.encode(), timeout_s=params.get("timeout_s")
                )
                for order in orders
            ]

    def build_connector_meta(self, step: kv.KVStep) -> Script | None:
        if step.finished:
            self.told.append(("finished", *sorted(step.finished)))
        assert step.payload is None or isinstance(step.payload, Script)
        return step.payload

    def take_transfers(self) -> list[kv.KVTransfer]:
        transfers, self.transfers = self.transfers, []
        return transfers

    def accept_transfer(self, transfer: kv.KVTransfer) -> str | None:
        return self.rejected or None

    def update_connector_output(self, output: kv.KVConnectorOutput) -> None:
        self.told.append(output)

    def request_finished(
        self, request: kv.KVRequest, block_ids: Sequence[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self.told.append(("request_finished", request.request_id, tuple(block_ids)))
        keep = bool((request.kv_transfer_params or {}).get("keep"))
        return keep, {"blocks": list(block_ids)} if keep else None

    def take_events(self) -> list[kv.KVEvent]:
        return [kv.KVEvent("stored", (b"x",), "disk")]


class Rig:
    """A runtime with that connector on some chips."""

    def __init__(self, worker: simpler.Worker, runtime: kv.KVRuntime, log: Path) -> None:
        self.worker = worker
        self.runtime = runtime
        self.log = log
        self.buffers = [worker.malloc(2 * BLOCKS * BLOCK_BYTES, worker_id=chip) for chip in runtime.chips]

    @property
    def connector(self) -> ScriptedConnector:
        assert isinstance(self.runtime.connector, ScriptedConnector)
        return self.runtime.connector

    def caches(self) -> dict[str, list[simpler.Tensor]]:
        half = BLOCKS * BLOCK_BYTES
        return {
            name: [b.tensor((BLOCKS, BLOCK_BYTES), "uint8", offset=at * half) for b in self.buffers]
            for at, name in enumerate("kv")
        }

    def register(self) -> None:
        self.runtime.register_kv_caches(self.caches())

    def begin(self, request_id: str, blocks: Sequence[int] = (1, 2), **params: Any) -> kv.KVRequest:
        """A request whose blocks are loaded with the next step."""
        tokens = params.setdefault("tokens", len(blocks) * BLOCK_SIZE)
        request = kv.KVRequest(request_id, tokens, kv_transfer_params=params)
        matched, _ = self.runtime.get_num_new_matched_tokens(request)
        self.runtime.update_state_after_alloc(request, blocks, matched or 0)
        return request

    def step(self, **by_rank: Mapping[str, Any]) -> kv.KVStepOutput:
        """A step; ``r0={...}`` is the script of rank 0."""
        script = Script({int(rank[1:]): actions for rank, actions in by_rank.items()})
        return self.runtime.step(payload=script if by_rank else None)

    def until(self, done: Any) -> list[kv.KVStepOutput]:
        """Step until a predicate of an output holds, for 20 s at most; all outputs."""
        outputs, deadline = [self.runtime.step()], time.monotonic() + 20
        while not done(outputs[-1]):
            assert time.monotonic() < deadline, outputs[-1]
            outputs.append(self.runtime.step())
        return outputs

    def hooks(self, rank: int | None = 0) -> list[str]:
        """The hooks called so far, and forget them."""
        path = self.log / str(rank)
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return lines


@contextlib.contextmanager
def rig(
    log: Path, chips: int = 1, policy: Any = "fail", extra: Mapping[str, Any] | None = None, **options: Any
) -> Iterator[Rig]:
    """A Worker with so many chips and a runtime on all, or on ``on=``."""
    kv.register()
    on = options.pop("on", None)
    registered = options.pop("registered", True)
    config = kv.KVTransferConfig(
        "ScriptedConnector",
        "kv_both",
        "scripted",
        {"log": str(log), **(extra or {})},
        MODULE,
        policy,
    )
    with (
        simpler.Worker(
            device_ids=list(range(chips)), hbm_bytes=1 << 20, heap_bytes=1 << 20, control_timeout_s=20.0
        ) as worker,
        kv.KVRuntime(worker, config, block_size=BLOCK_SIZE, chips=on, **options) as runtime,
    ):
        made = Rig(worker, runtime, log)
        if registered:
            made.register()
        yield made
