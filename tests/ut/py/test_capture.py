"""Captured graphs: launched with other memory and scalars, refused when that does not fit."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import simpler
from simpler import IN, INOUT, OUT, CapturedGraph, HostBuffer, Orchestrator, Worker

if TYPE_CHECKING:
    from collections.abc import Iterator

Array = np.ndarray[Any, np.dtype[Any]]


def axpy(x: Array, y: Array, factor: float) -> float:
    y += factor * x
    return float(y[0])


def copy(x: Array, y: Array) -> None:
    y[:] = x


def kinds(*scalars: object) -> list[tuple[str, object]]:
    return [(type(scalar).__name__, scalar) for scalar in scalars]


@pytest.fixture(scope="module")
def node() -> Iterator[Worker]:
    with Worker(device_ids=[0, 1], num_sub_workers=1, hbm_bytes=1 << 20, heap_bytes=1 << 20) as worker:
        yield worker


class Vectors:
    """Vectors of 8 numbers in host buffers, and a graph y += f x, y += 2 x over two chips."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.axpy = worker.register(axpy)
        self.x, self.y = self.vector(1.0), self.vector(0.0)

    def vector(self, value: float) -> HostBuffer:
        buffer = self.worker.create_buffer(64)
        buffer.array(8, "float64")[:] = value
        return buffer

    def graph(self) -> CapturedGraph:
        def fn(orch: Orchestrator, args: Any, _config: object) -> Any:
            half = orch.submit(self.axpy, IN(args["x"][0:4]), INOUT(args["y"][0:4]), args["f"], worker=0)
            return [half, orch.submit(self.axpy, IN(args["x"]), INOUT(args["y"]), 2.0, worker=1)]

        arguments = {"x": self.x.tensor(8, "float64"), "y": self.y.tensor(8, "float64"), "f": 3.0}
        return self.worker.capture(fn, arguments)


@pytest.fixture
def vectors(node: Worker) -> Vectors:
    return Vectors(node)


def values(buffer: HostBuffer) -> list[float]:
    return [float(value) for value in buffer.array(8, "float64")]


def test_nothing_runs_while_a_function_is_captured(vectors: Vectors) -> None:
    graph = vectors.graph()
    assert (graph.num_tasks, graph.parameters, values(vectors.y)) == (2, ("x", "y", "f"), [0.0] * 8)


def test_a_launch_runs_the_tasks_in_order_and_gives_their_results(vectors: Vectors) -> None:
    graph = vectors.graph()
    assert graph.launch().result() == [3.0, 5.0]
    assert graph.launch().result() == [8.0, 10.0]
    assert values(vectors.y) == [10.0] * 4 + [4.0] * 4


def test_parameters_and_their_parts_move_with_what_is_bound(vectors: Vectors) -> None:
    graph, other = vectors.graph(), vectors.vector(100.0)
    assert graph.launch(y=other.tensor(8, "float64"), f=5).result() == [105.0, 107.0]
    assert values(other) == [107.0] * 4 + [102.0] * 4
    assert values(vectors.y) == [0.0] * 8


def test_results_come_in_the_shape_that_the_function_returned(node: Worker) -> None:
    show = node.register(kinds)
    graph = node.capture(
        lambda orch, _a, _c: {"one": orch.submit(show, 1), "more": (orch.submit(show, 2), [3])}
    )
    assert graph.launch().result() == {"one": [("int", 1)], "more": ([("int", 2)], [3])}


def test_scalars_keep_their_kind(node: Worker) -> None:
    show = node.register(kinds)
    graph = node.capture(
        lambda orch, args, _c: orch.submit(show, args["flag"], args["count"], args["rate"]),
        {"flag": True, "count": 3, "rate": 0.5},
    )
    assert graph.launch().result() == [("bool", True), ("int", 3), ("float", 0.5)]
    bound = graph.launch(flag=False, count=-(1 << 63), rate=2)
    assert bound.result() == [("bool", False), ("int", -(1 << 63)), ("float", 2.0)]
    for wrong in ({"flag": 1}, {"count": 1.5}, {"count": True}, {"rate": "2"}):
        with pytest.raises(TypeError, match=next(iter(wrong))):
            graph.launch(**wrong)
    with pytest.raises(OverflowError):
        graph.launch(count=1 << 63)


@pytest.mark.parametrize(
    ("shape", "dtype", "what"), [(4, "float64", "shape"), (8, "int64", "dtype"), ((8,), "float32", "dtype")]
)
def test_another_shape_or_type_is_refused(vectors: Vectors, shape: Any, dtype: str, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        vectors.graph().launch(y=vectors.vector(0.0).tensor(shape, dtype))


def test_another_owner_and_an_unknown_name_are_refused(vectors: Vectors) -> None:
    graph = vectors.graph()
    device = vectors.worker.malloc(64, worker_id=1)
    with pytest.raises(ValueError, match="worker 1"):
        graph.launch(y=device.tensor(8, "float64"))
    with pytest.raises(ValueError, match="'z'"):
        graph.launch(z=1)
    with pytest.raises(TypeError, match="Tensor"):
        graph.launch(y=3)
    vectors.worker.free(device)


@pytest.mark.parametrize("name", ["x", "y"])
def test_each_argument_that_was_freed_is_refused_and_nothing_runs(vectors: Vectors, name: str) -> None:
    graph, kept = vectors.graph(), vectors.y if name == "x" else vectors.x
    before = values(kept)
    vectors.worker.free(getattr(vectors, name))
    with pytest.raises(simpler.MemoryRangeError, match="freed"):
        graph.launch()
    assert values(kept) == before
    bindings: dict[str, Any] = {name: vectors.vector(1.0).tensor(8, "float64")}
    assert graph.launch(**bindings).result() != [0.0, 0.0]


def test_memory_of_the_graph_lives_as_long_as_it_does(node: Worker, vectors: Vectors) -> None:
    both = node.register(copy)

    def through_scratch(orch: Orchestrator, args: Any, _config: object) -> None:
        between = orch.alloc(8, "float64")
        with orch.scope():
            orch.submit(both, IN(args["x"]), OUT(between), worker=0)
        orch.submit(both, IN(between), OUT(args["y"]), worker=1)

    arguments = {"x": vectors.x.tensor(8, "float64"), "y": vectors.y.tensor(8, "float64")}
    graph = node.capture(through_scratch, arguments)
    for _ in range(3):
        graph.launch().result()
    assert values(vectors.y) == [1.0] * 8
    graph.close()
    with pytest.raises(simpler.ClosedError):
        graph.launch()


def test_launches_of_two_threads_are_whole(node: Worker) -> None:
    vectors = [Vectors(node) for _ in range(2)]
    graph = vectors[0].graph()

    def launch(mine: Vectors) -> None:
        for _ in range(50):
            graph.launch(x=mine.x.tensor(8, "float64"), y=mine.y.tensor(8, "float64")).result()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(launch, vectors))
    assert [values(mine.y) for mine in vectors] == [[250.0] * 4 + [100.0] * 4] * 2


def test_what_a_capture_cannot_tell_apart_is_refused(node: Worker, vectors: Vectors) -> None:
    whole, part = vectors.x.tensor(8, "float64"), vectors.x.tensor(4, "float64", offset=16)
    with pytest.raises(ValueError, match="overlap"):
        node.capture(lambda *_: None, {"whole": whole, "part": part})
    with pytest.raises(ValueError, match="'part'"):
        node.capture(
            lambda orch, _a, _c: orch.submit(vectors.axpy, IN(whole), INOUT(whole), 1.0, worker=0),
            {"part": part},
        )
    with pytest.raises(RuntimeError, match="captured"):
        node.capture(lambda orch, _a, _c: orch.submit(vectors.axpy, 1.0, worker=0).result())


def test_the_drawing_names_tasks_and_dependencies(vectors: Vectors) -> None:
    dot = vectors.graph().to_dot()
    assert dot.startswith("digraph")
    assert "t0 -> t1;" in dot
    assert "0: axpy\\nchip 0" in dot
