"""The end of a graph: from the model's outputs and the labels to the mean loss. Losses are averaged in float64, because
a probe is a small difference of means."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper

from baffle.core.samples import PADDING
from baffle.errors import ModelError
from baffle.runtime.onnx.model_folder import CROSS_ENTROPY, LOGITS, LOSS, NO_LOSS, GraphLoss, Y

LOSSES, DOUBLES = "losses", "losses/float64"
OUTPUTS, LABELS = "outputs/float64", "labels/float64"


class Ending(NamedTuple):
    """Nodes from LOGITS and Y to LOSS, and the labels that they take: their type, and the shape of one sample's."""

    nodes: list[NodeProto]
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
        return Ending([], TensorProto.FLOAT, (), classes)
    nodes = [*_doubles(LOGITS, OUTPUTS, Y, LABELS), *NUMBERS[loss], _mean(DOUBLES)]
    return Ending(nodes, TensorProto.FLOAT, shape, classes)


def _cross_entropy(shape: tuple[int, ...], label_shape: tuple[int, ...] | None) -> Ending:
    if not shape:
        raise ModelError("the output must be logits of shape (batch, classes), got (batch,); export it like that")
    if len(shape) > 1:
        return _over_positions(shape, last=label_shape is None or label_shape == shape[:-1])
    losses = helper.make_node("SoftmaxCrossEntropyLoss", [LOGITS, Y], [LOSSES], reduction="none")
    return Ending([losses, *_doubles(LOSSES, DOUBLES), _mean(DOUBLES)], TensorProto.INT64, (), shape[0])


def _over_positions(shape: tuple[int, ...], *, last: bool) -> Ending:
    """The mean over a sample's positions that are not padding, and then over samples."""
    rank = len(shape) + 1
    by_class = "logits/by class"
    order = [0, rank - 1, *range(1, rank - 1)] if last else list(range(rank))
    positions, classes = (shape[:-1], shape[-1]) if last else (shape[1:], shape[0])
    nodes = [
        helper.make_node("Transpose", [LOGITS], [by_class], perm=order),
        helper.make_node("SoftmaxCrossEntropyLoss", [by_class, Y], [LOSSES], reduction="none", ignore_index=PADDING),
        *_doubles(LOSSES, DOUBLES),
        _constant("axes", np.arange(1, rank - 1, dtype=np.int64)),
        helper.make_node("ReduceSum", [DOUBLES, "axes"], ["losses/sums"], keepdims=0),
        _constant("padding", np.array(PADDING, np.int64)),
        helper.make_node("Equal", [Y, "padding"], ["labels/padded"]),
        helper.make_node("Not", ["labels/padded"], ["labels/counted"]),
        *_doubles("labels/counted", "labels/ones"),
        helper.make_node("ReduceSum", ["labels/ones", "axes"], ["labels/sums"], keepdims=0),
        _constant("one", np.array(1, np.float64)),
        helper.make_node("Max", ["labels/sums", "one"], ["labels/counts"]),
        helper.make_node("Div", ["losses/sums", "labels/counts"], ["losses/means"]),
        _mean("losses/means"),
    ]
    return Ending(nodes, TensorProto.INT64, positions, classes)


def _mean(losses: str) -> NodeProto:
    return helper.make_node("ReduceMean", [losses], [LOSS], keepdims=0)


def _doubles(*names: str) -> list[NodeProto]:
    """Values in float64: the name of each, followed by its new name."""
    pairs = zip(names[::2], names[1::2], strict=True)
    return [helper.make_node("Cast", [value], [double], to=TensorProto.DOUBLE) for value, double in pairs]


def _constant(name: str, value: "np.ndarray[tuple[int, ...], np.dtype[np.float64 | np.int64]]") -> NodeProto:
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(value, name))


NUMBERS: Mapping[str, list[NodeProto]] = {
    "mse": [
        helper.make_node("Sub", [OUTPUTS, LABELS], ["differences"]),
        helper.make_node("Mul", ["differences", "differences"], [DOUBLES]),
    ],
    "mae": [
        helper.make_node("Sub", [OUTPUTS, LABELS], ["differences"]),
        helper.make_node("Abs", ["differences"], [DOUBLES]),
    ],
    "bce": [  # max(x, 0) − x·y + log(1 + exp(−|x|)), which overflows nowhere
        _constant("zero", np.array(0, np.float64)),
        _constant("one", np.array(1, np.float64)),
        helper.make_node("Max", [OUTPUTS, "zero"], ["positive"]),
        helper.make_node("Mul", [OUTPUTS, LABELS], ["products"]),
        helper.make_node("Sub", ["positive", "products"], ["linear"]),
        helper.make_node("Abs", [OUTPUTS], ["sizes"]),
        helper.make_node("Neg", ["sizes"], ["negative"]),
        helper.make_node("Exp", ["negative"], ["powers"]),
        helper.make_node("Add", ["powers", "one"], ["sums"]),
        helper.make_node("Log", ["sums"], ["curved"]),
        helper.make_node("Add", ["linear", "curved"], [DOUBLES]),
    ],
}
"""Losses of numbers, from outputs and labels in float64 to the loss of each number."""
