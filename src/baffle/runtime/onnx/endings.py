"""The end of a graph: from the model's outputs and the labels to the mean loss. Losses are averaged in float64, because
a probe is a small difference of means."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from baffle.core.samples import PADDING
from baffle.errors import ModelError
from baffle.runtime.onnx.model_folder import CROSS_ENTROPY, LOGITS, LOSS, NO_LOSS, GraphLoss, Y
from baffle.runtime.onnx.protobuf import DOUBLE, FLOAT, INT64, node, tensor

LOSSES, DOUBLES = "losses", "losses/float64"
OUTPUTS, LABELS = "outputs/float64", "labels/float64"


class Ending(NamedTuple):
    """Nodes from LOGITS and Y to LOSS, and the labels that they take: their type, and the shape of one sample's."""

    nodes: list[bytes]
    label_type: int
    label_shape: tuple[int, ...]
    classes: int


def ending(loss: GraphLoss, sizes: Sequence[int], label_shape: tuple[int, ...] | None = None) -> Ending:
    """The end of a graph whose outputs have these sizes for each sample. `label_shape` is known if there is data; it
    decides which axis is that of the classes. Without it that is the last."""
    shape = tuple(sizes)
    if loss == CROSS_ENTROPY:
        return _cross_entropy(shape, label_shape)
    classes = int(np.prod(shape))
    if loss == NO_LOSS:
        return Ending([], FLOAT, (), classes)
    nodes = [*_doubles(LOGITS, OUTPUTS, Y, LABELS), *NUMBERS[loss], _mean(DOUBLES)]
    return Ending(nodes, FLOAT, shape, classes)


def _cross_entropy(shape: tuple[int, ...], label_shape: tuple[int, ...] | None) -> Ending:
    if not shape:
        raise ModelError("the output must be logits of shape (batch, classes), got (batch,); export it like that")
    if len(shape) > 1:
        return _over_positions(shape, last=label_shape is None or label_shape == shape[:-1])
    losses = node("SoftmaxCrossEntropyLoss", [LOGITS, Y], [LOSSES], reduction="none")
    return Ending([losses, *_doubles(LOSSES, DOUBLES), _mean(DOUBLES)], INT64, (), shape[0])


def _over_positions(shape: tuple[int, ...], *, last: bool) -> Ending:
    """The mean over a sample's positions that are not padding, and then over samples."""
    rank = len(shape) + 1
    by_class = "logits/by class"
    order = [0, rank - 1, *range(1, rank - 1)] if last else list(range(rank))
    positions, classes = (shape[:-1], shape[-1]) if last else (shape[1:], shape[0])
    nodes = [
        node("Transpose", [LOGITS], [by_class], perm=order),
        node("SoftmaxCrossEntropyLoss", [by_class, Y], [LOSSES], reduction="none", ignore_index=PADDING),
        *_doubles(LOSSES, DOUBLES),
        _constant("axes", np.arange(1, rank - 1, dtype=np.int64)),
        node("ReduceSum", [DOUBLES, "axes"], ["losses/sums"], keepdims=0),
        _constant("padding", np.array(PADDING, np.int64)),
        node("Equal", [Y, "padding"], ["labels/padded"]),
        node("Not", ["labels/padded"], ["labels/counted"]),
        *_doubles("labels/counted", "labels/ones"),
        node("ReduceSum", ["labels/ones", "axes"], ["labels/sums"], keepdims=0),
        _constant("one", np.array(1, np.float64)),
        node("Max", ["labels/sums", "one"], ["labels/counts"]),
        node("Div", ["losses/sums", "labels/counts"], ["losses/means"]),
        _mean("losses/means"),
    ]
    return Ending(nodes, INT64, positions, classes)


def _mean(losses: str) -> bytes:
    return node("ReduceMean", [losses], [LOSS], keepdims=0)


def _doubles(*names: str) -> list[bytes]:
    """Values in float64: the name of each, followed by its new name."""
    pairs = zip(names[::2], names[1::2], strict=True)
    return [node("Cast", [value], [double], to=DOUBLE) for value, double in pairs]


def _constant(name: str, value: "np.ndarray[tuple[int, ...], np.dtype[np.float64 | np.int64]]") -> bytes:
    return node("Constant", [], [name], value=tensor(name, value))


NUMBERS: Mapping[str, list[bytes]] = {
    "mse": [
        node("Sub", [OUTPUTS, LABELS], ["differences"]),
        node("Mul", ["differences", "differences"], [DOUBLES]),
    ],
    "mae": [
        node("Sub", [OUTPUTS, LABELS], ["differences"]),
        node("Abs", ["differences"], [DOUBLES]),
    ],
    "bce": [  # max(x, 0) − x·y + log(1 + exp(−|x|)), which overflows nowhere
        _constant("zero", np.array(0, np.float64)),
        _constant("one", np.array(1, np.float64)),
        node("Max", [OUTPUTS, "zero"], ["positive"]),
        node("Mul", [OUTPUTS, LABELS], ["products"]),
        node("Sub", ["positive", "products"], ["linear"]),
        node("Abs", [OUTPUTS], ["sizes"]),
        node("Neg", ["sizes"], ["negative"]),
        node("Exp", ["negative"], ["powers"]),
        node("Add", ["powers", "one"], ["sums"]),
        node("Log", ["sums"], ["curved"]),
        node("Add", ["linear", "curved"], [DOUBLES]),
    ],
}
"""Losses of numbers, from outputs and labels in float64 to the loss of each number."""
