"""One model on several chips, each with some of the layers in a row.

Each chip hands the residual stream to the next, which reads it out of the window of the one before.
The arithmetic is that of ``generate``, so the tokens are too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from simpler import IN, INOUT, OUT
from simpler.models.graph_model import Chip, GraphModel, Step
from simpler.models.shard import even_ranges, split_layers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from simpler.models.llama import Llama
    from simpler.task_args import Tagged

# One task for each layer made a token of SmolLM2-135M 6% slower than one task for all: a kernel that
# has read 14 MB of weights leaves nothing in the caches for the Python code around the next.
LAYERS_OF_TASK = 5


class PipelineModel(GraphModel):
    """See the module.

    Args:
        model: The whole model.
        chips: How many.
        layers_of_task: Most layers that one task computes.

    Attributes:
        layers_of_task: As given.

    Raises:
        ModelError: more chips than layers.
        ValueError: ``layers_of_task`` below 1.
    """

    def __init__(self, model: Llama, chips: int = 2, *, layers_of_task: int = LAYERS_OF_TASK) -> None:
        if layers_of_task < 1:
            raise ValueError(f"a task computes at least one layer, not {layers_of_task}")
        self.layers_of_task = layers_of_task
        super().__init__(model, split_layers(model.config, chips))

    def _record(self, step: Step) -> None:
        logits = self._logits_tensor(range(self._model.config.vocabulary))
        record_layers(step, self.chips, logits, self.layers_of_task)


def record_layers(step: Step, chips: Sequence[Chip], logits: Tagged, layers_of_task: int) -> None:
    """Submit the layers of all chips in a row, at most ``layers_of_task`` in each task."""
    window = step.allocate(chips, "stream")
    for index, chip in enumerate(chips):
        stream = window.tensor("stream", chip.number)
        if index == 0:
            step.embed(chip, stream)
        else:
            step.tasks.next_stage()
            before = IN(window.tensor("stream", chips[index - 1].number))
            step.tasks.submit(chip.kernels.receive, before, OUT(stream), step.count, chip=chip.number)
        count = len(chip.shard.layers)
        for layers in even_ranges(count, -(-count // layers_of_task)):
            step.tasks.submit(
                chip.kernels.layers,
                chip.weights(),
                chip.caches(layers),
                INOUT(stream),
                layers.start,
                len(layers),
                step.start,
                step.count,
                chip=chip.number,
            )
    last = chips[-1]
    stream = window.tensor("stream", last.number)
    step.tasks.submit(last.kernels.logits, last.weights(), IN(stream), logits, step.count, chip=last.number)
