"""One model on several chips, each with some of the heads and feed-forward columns of every layer.

All chips hold the residual stream. In each half of a layer every chip writes its share of what the
half adds into its window; then every chip reads all shares and adds them, in the same order. Sums
are taken in another order than by one process, so logits differ in their last bits: ``compare``
says what difference is accepted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from simpler import IN, INOUT, OUT
from simpler.models.graph_model import GraphModel, Step
from simpler.models.shard import split_heads

if TYPE_CHECKING:
    from simpler import Tensor
    from simpler.models.llama import Llama
    from simpler.task_args import Tagged

# The shares of one half of a layer are still read while those of the next are written.
_SHARES = ("share 0", "share 1")


class TensorParallelModel(GraphModel):
    """See the module.

    Args:
        model: The whole model.
        chips: How many.

    Raises:
        ModelError: more chips than key and value heads.
    """

    def __init__(self, model: Llama, chips: int = 2) -> None:
        super().__init__(model, split_heads(model.config, chips))

    def _record(self, step: Step) -> None:
        window = step.allocate(self.chips, "stream", *_SHARES)
        streams = [window.tensor("stream", chip.number) for chip in self.chips]
        shares = [[window.tensor(name, chip.number) for chip in self.chips] for name in _SHARES]
        for chip, stream in zip(self.chips, streams, strict=True):
            step.embed(chip, stream)
        before: list[Tagged] = []
        for layer in range(self._model.config.layers):
            self._attend(step, layer, streams, shares[0], before)
            before = [IN(share) for share in shares[0]]
            step.tasks.next_stage()
            self._feed_forward(step, layer, streams, shares[1], before)
            before = [IN(share) for share in shares[1]]
            step.tasks.next_stage()
        for chip, stream in zip(self.chips, streams, strict=True):
            logits = self._logits_tensor(chip.shard.vocabulary)
            items = chip.weights(), IN(stream), logits, step.count, *before
            step.tasks.submit(chip.kernels.logits, *items, chip=chip.number)

    def _attend(
        self, step: Step, layer: int, streams: list[Tensor], shares: list[Tensor], before: list[Tagged]
    ) -> None:
        for chip, stream, share in zip(self.chips, streams, shares, strict=True):
            items = chip.weights(), chip.caches(range(layer, layer + 1)), INOUT(stream), OUT(share)
            scalars = layer, step.start, step.count
            step.tasks.submit(chip.kernels.attend, *items, *scalars, *before, chip=chip.number)

    def _feed_forward(
        self, step: Step, layer: int, streams: list[Tensor], shares: list[Tensor], before: list[Tagged]
    ) -> None:
        for chip, stream, share in zip(self.chips, streams, shares, strict=True):
            items = chip.weights(), INOUT(stream), OUT(share), layer, step.count
            step.tasks.submit(chip.kernels.feed_forward, *items, *before, chip=chip.number)
