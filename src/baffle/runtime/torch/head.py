"""The last linear layer of a module: where it is, and what a forward pass knows about it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from baffle.core.arrays import F64
from baffle.core.head import Head
from baffle.core.ports import Batch
from baffle.errors import NoHeadError
from baffle.runtime.model import USED_TWICE, require_closed_form
from baffle.runtime.torch.tensors import as_tensors, call, trained_parameters

RESHAPES = ("View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze")
KEEPS = (*RESHAPES, "Alias", "Clone", "ToCopy")
"""What gives the numbers that it takes, in the same order, by the names of its derivatives."""


def linear_layers(module: nn.Module) -> dict[Head, nn.Linear]:
    """Every linear layer whose weight is trained, by its place among the weights. A subclass may compute anything."""
    parameters = trained_parameters(module)
    stops = np.cumsum([parameter.numel() for parameter in parameters]).tolist()
    places = {id(p): (stop - p.numel(), stop) for p, stop in zip(parameters, stops, strict=True)}
    found = dict[Head, nn.Linear]()
    for layer in module.modules():
        if type(layer) is nn.Linear and "forward" not in vars(layer) and id(layer.weight) in places:
            bias = (0, 0) if layer.bias is None else places.get(id(layer.bias))
            if bias is not None:
                found[Head(places[id(layer.weight)], bias)] = layer
    return found


@contextmanager
def watched(layer: nn.Linear) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Inside, every input of a layer is kept with its output."""
    seen = list[tuple[Tensor, Tensor]]()

    def keep(_: nn.Module, given: tuple[Any, ...], output: Tensor) -> None:
        seen.append((given[0], output))

    handle = layer.register_forward_hook(keep)
    try:
        yield seen
    finally:
        handle.remove()


def find_head(module: nn.Module, loss: str, batch: Batch) -> Head:
    """The last linear layer, by the derivatives that PyTorch records on a batch. Its numbers must be the module's
    outputs, in any shape (under cross-entropy also their logarithmic softmax), and nothing else may use its parameters.
    Refuses other modules, and says what it found."""
    require_closed_form(loss)
    layers, made = linear_layers(module), dict[Any, Head]()
    module.eval()
    handles = [
        layer.register_forward_hook(lambda _layer, _given, output, place=place: made.update({output.grad_fn: place}))
        for place, layer in layers.items()
    ]
    with torch.enable_grad():
        outputs = call(module, as_tensors(batch.x))
    for handle in handles:
        handle.remove()
    if loss == "cross_entropy" and outputs.shape[:-1] != batch.y.shape:
        raise NoHeadError(f"the last axis of outputs of shape {tuple(outputs.shape)} is not the classes")
    place = made.get(_behind(outputs, loss, made))
    if place is None:
        words = f"the outputs come from {_name(_behind(outputs, loss, made))}, not from a trained nn.Linear"
        raise NoHeadError(words)
    own = {id(parameter) for parameter in layers[place].parameters()}
    used = [
        id(variable) for node in _uses(outputs.grad_fn) if (variable := getattr(node, "variable", None)) is not None
    ]
    if sum(parameter in own for parameter in used) > len(own):
        raise NoHeadError(USED_TWICE)
    return place


def _behind(outputs: Tensor, loss: str, made: dict[Any, Head]) -> Any:
    """What made the numbers of the outputs, before they were copied, reshaped or, as cross-entropy allows, turned into
    logarithms of probabilities."""
    node, shape = outputs.grad_fn, outputs.shape
    last = (len(shape) - 1, 2**64 - 1)  # PyTorch keeps −1 as an unsigned number
    reshaped = False
    while node is not None and node not in made:
        name = _name(node)
        logarithms = name == "LogSoftmax" and loss == "cross_entropy" and not reshaped and node._saved_dim in last  # type: ignore[attr-defined]
        if not logarithms and name not in KEEPS:
            break
        reshaped = reshaped or name in RESHAPES
        node = node.next_functions[0][0]
    return node


def _name(node: Any) -> str:
    """An operation of PyTorch, by its derivative: "Relu" of "ReluBackward0"."""
    return "nothing that is trained" if node is None else str(node.name()).rpartition("::")[2].partition("Backward")[0]


def _uses(node: Any) -> Iterator[Any]:
    """Everything that outputs follow from, once for each use."""
    known, left = {node}, [node]
    while left:
        for used, _ in left.pop().next_functions:
            if used is not None:
                yield used
                if used not in known:
                    known.add(used)
                    left.append(used)


def rows(tensors: Sequence[Tensor], samples: int) -> F64:
    """Inputs or outputs of a linear layer, a row for each sample."""
    joined = torch.cat([tensor.detach().to("cpu", torch.float64) for tensor in tensors]).numpy()
    return joined.reshape(samples, -1, joined.shape[-1])
