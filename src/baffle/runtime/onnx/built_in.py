"""BAFFLE's own models as ONNX graphs, made without PyTorch and without `onnx`, so that any client can make them.
Layers, names and the order of the weights are those of the modules in `baffle.models`, so that both hold the same flat
vector; tests compare the two."""

from collections.abc import Callable, Sequence
from math import gcd, prod, sqrt
from typing import Any

import numpy as np

from baffle.core.arrays import F32
from baffle.models.drawing import draw_weights
from baffle.models.inputs import Inputs
from baffle.plan import WRN, LeNet, Model, Softmax
from baffle.runtime.onnx.endings import Ending, ending
from baffle.runtime.onnx.graph import PREFIX, OnnxGraph, ShownHead
from baffle.runtime.onnx.model_folder import (
    CROSS_ENTROPY,
    HEAD_INPUTS,
    HEAD_OUTPUTS,
    LOGITS,
    LOSS,
    NO_LOSS,
    WEIGHT,
    GraphLoss,
    HeadTensors,
    Input,
    X,
    Y,
)
from baffle.runtime.onnx.protobuf import DOUBLE, FLOAT, Attribute, described, model, node, tensor

OPSET, IR_VERSION = 17, 8  # old enough for every ONNX Runtime that BAFFLE supports

EPSILON = 1e-5  # added to a variance, as PyTorch's normalisations do


ACTIVATIONS = {"hardswish": "HardSwish", "relu": "Relu", "selu": "Selu"}  # activations that are one operator


class Chain:
    """A model under construction. `at` is the output of the newest layer, of shape `shape` for each sample."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.at = PREFIX + X
        self.weights: dict[str, tuple[int, ...]] = {}
        self.nodes = list[bytes]()
        self.constants = list[bytes]()
        self.head: ShownHead | None = None

    def add(self, operator: str, *others: str, inputs: Sequence[str] = (), **attributes: Attribute) -> "Chain":
        """Apply an operator to the newest output, or to `inputs`."""
        name = f"{PREFIX}{len(self.nodes)}/{operator}"
        self.nodes.append(node(operator, [*(inputs or [self.at]), *others], [name], "", **attributes))
        self.at = name
        return self

    def constant(self, values: Sequence[float] | Sequence[int] | float, dtype: type = np.float32) -> str:
        name = f"{PREFIX}constant/{len(self.constants)}"
        self.constants.append(tensor(name, np.array(values, dtype)))
        return name

    def weight(self, name: str, *shape: int) -> str:
        self.weights[name] = shape
        return WEIGHT + name

    def convolve(self, name: str, channels: int, size: int, stride: int = 1, *, bias: bool = True) -> "Chain":
        """A convolution of size × size, padded so that stride 1 keeps the image's size."""
        before, *image = self.shape
        weights = [self.weight(f"{name}.weight", channels, before, size, size)]
        weights += [self.weight(f"{name}.bias", channels)] if bias else []
        self.shape = (channels, *((pixels - 1) // stride + 1 for pixels in image))
        pads = [size // 2] * 4
        return self.add("Conv", *weights, kernel_shape=[size, size], strides=[stride, stride], pads=pads)

    def normalise(self, name: str) -> "Chain":
        """A normalisation without scale and shift. That of a batch uses the batch's own statistics."""
        if name == "group":
            groups = gcd(8, self.shape[0])
            self.add("Reshape", self.constant([0, groups, -1], np.int64))
            ones, zeros = self.constant([1.0] * groups), self.constant([0.0] * groups)
            self.add("InstanceNormalization", ones, zeros, epsilon=EPSILON)
            self.add("Reshape", self.constant([-1, *self.shape], np.int64))
        elif name == "batch":
            before, axes = self.at, [0, 2, 3]
            mean = self.add("ReduceMean", axes=axes).at
            centred = self.add("Sub", inputs=[before, mean]).at
            self.add("Mul", inputs=[centred, centred]).add("ReduceMean", axes=axes)
            deviation = self.add("Add", self.constant(EPSILON)).add("Sqrt").at
            self.add("Div", inputs=[centred, deviation])
        return self

    def activate(self, name: str) -> "Chain":
        if name in ACTIVATIONS:
            return self.add(ACTIVATIONS[name])
        if name == "relu6":
            return self.add("Clip", self.constant(0.0), self.constant(6.0))
        before = self.at
        self.add("Div", self.constant(sqrt(2.0))).add("Erf").add("Add", self.constant(1.0))
        return self.add("Mul", inputs=[before, self.at]).add("Mul", self.constant(0.5))

    def halve(self) -> "Chain":
        """The largest of each 2 × 2 pixels."""
        channels, height, width = self.shape
        self.shape = (channels, height // 2, width // 2)
        return self.add("MaxPool", kernel_shape=[2, 2], strides=[2, 2])

    def average(self) -> "Chain":
        """The average over all pixels."""
        self.shape = (self.shape[0], 1, 1)
        return self.add("GlobalAveragePool")

    def classify(self, name: str, classes: int) -> "Chain":
        """A linear layer on everything, flattened."""
        width = prod(self.shape)
        weight, bias = self.weight(f"{name}.weight", classes, width), self.weight(f"{name}.bias", classes)
        self.shape = (classes,)
        inputs = self.add("Flatten").at
        self.add("Gemm", weight, bias, transB=1)
        self.head = ShownHead(inputs, self.at, HeadTensors(f"{name}.weight", f"{name}.bias"))
        return self


def lenet(settings: LeNet, chain: Chain, classes: int) -> None:
    first, second = settings.channels
    chain.convolve("0", first, 5).normalise(settings.norm).activate(settings.activation).halve()
    chain.convolve("4", second, 5).normalise(settings.norm).activate(settings.activation)
    if settings.head == "average":
        chain.average()
    chain.classify("9" if settings.head == "average" else "8", classes)


def wrn(settings: WRN, chain: Chain, classes: int) -> None:
    chain.convolve("0", 16, 3)
    for number, (channels, stride) in enumerate([(16, 1), (32, 2), (64, 2)], 1):
        _block(settings, chain, str(number), channels * settings.widen, stride)
    chain.normalise(settings.norm).activate(settings.activation).average().classify("8", classes)


def _block(settings: WRN, chain: Chain, name: str, channels: int, stride: int) -> None:
    chain.normalise(settings.norm).activate(settings.activation)
    prepared, before = chain.at, chain.shape
    chain.convolve(f"{name}.residual.0", channels, 3, stride, bias=False)
    chain.normalise(settings.norm).activate(settings.activation)
    residual = chain.convolve(f"{name}.residual.3", channels, 3, bias=False).at
    chain.at, chain.shape = prepared, before
    shortcut = chain.convolve(f"{name}.shortcut", channels, 1, stride, bias=False).at
    chain.add("Add", inputs=[residual, shortcut])


def softmax(_: Softmax, chain: Chain, classes: int) -> None:
    chain.classify("1", classes)


BUILDERS: dict[type[Model], Callable[[Any, Chain, int], None]] = {LeNet: lenet, WRN: wrn, Softmax: softmax}
"""Builders by the type of a model's settings in a plan. Other models need PyTorch, or come as ONNX."""


def built_in(
    settings: Model, inputs: Inputs, seed: int, loss: GraphLoss = CROSS_ENTROPY, *, head: bool = False
) -> OnnxGraph:
    """The graph of a plan's model, with the initial weights of `task.init = "numpy"`. With `head`, it also shows what
    its last linear layer takes and gives."""
    images = isinstance(settings, (LeNet, WRN))
    shape = inputs.image_shape(str(settings.__struct_config__.tag)) if images else inputs.one_shape()
    chain = Chain(shape)
    BUILDERS[type(settings)](settings, chain, inputs.outputs)
    edges = np.cumsum([prod(sizes) for sizes in chain.weights.values()])
    parts: list[F32] = np.split(draw_weights(chain.weights, seed), edges[:-1])
    named = zip(chain.weights.items(), parts, strict=True)
    weights = {name: part.reshape(sizes) for (name, sizes), part in named}
    end, taken = ending(loss, chain.shape), (Input("", shape),)
    shown = chain.head if head else None
    data = _finished(chain, shape, end, loss, shown)
    tensors = shown.tensors if shown else None
    return OnnxGraph(data, OPSET, weights, taken, end.classes, loss=loss, label_shape=end.label_shape, head=tensors)


def _finished(chain: Chain, shape: tuple[int, ...], end: Ending, loss: GraphLoss, head: ShownHead | None) -> bytes:
    """The chain as an ONNX model: from samples of this shape, labels and weights to the loss and the outputs."""
    first, last = node("Cast", [X], [PREFIX + X], to=FLOAT), node("Cast", [chain.at], [LOGITS], to=FLOAT)
    labels = [described(Y, end.label_type, ("batch", *end.label_shape))] if loss != NO_LOSS else []
    trained = [described(WEIGHT + name, FLOAT, sizes) for name, sizes in chain.weights.items()]
    losses = [described(LOSS, DOUBLE, ())] if loss != NO_LOSS else []
    pairs = [(head.inputs, HEAD_INPUTS), (head.outputs, HEAD_OUTPUTS)] if head else []
    shown = [node("Identity", [inside], [name]) for inside, name in pairs]
    inner = [described(name, FLOAT, ("batch", None)) for _, name in pairs]
    return model(
        [first, *chain.nodes, last, *end.nodes, *shown],
        chain.constants,
        [described(X, FLOAT, ("batch", *shape)), *labels, *trained],
        [*losses, described(LOGITS, FLOAT, ("batch", None)), *inner],
        opset=OPSET,
        ir_version=IR_VERSION,
    )
