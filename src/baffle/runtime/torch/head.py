"""The last linear layer of a module: where it is, and what a forward pass knows about it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from baffle.core.arrays import F64
from baffle.core.head import Head
from baffle.core.ports import Batch
from baffle.errors import PlanError
from baffle.runtime.model import NO_HEAD, require_closed_form
from baffle.runtime.torch.tensors import as_tensors, call, trained_parameters


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

    hook = layer.register_forward_hook(keep)
    try:
        yield seen
    finally:
        hook.remove()


def find_head(module: nn.Module, loss: str, batch: Batch) -> Head:
    """The last linear layer, tried on a batch: it must be used once, and the module's outputs must be its own, whatever
    their shape (under cross-entropy also their logarithmic softmax). Refuses other modules, and says what it found."""
    require_closed_form(loss)
    layers, used = linear_layers(module), list[tuple[Head, Tensor]]()

    def note(place: Head) -> Any:
        return lambda _module, _inputs, output: used.append((place, output))

    hooks = [layer.register_forward_hook(note(place)) for place, layer in layers.items()]
    module.eval()
    with torch.inference_mode():
        outputs = call(module, as_tensors(batch.x))
    for hook in hooks:
        hook.remove()
    if not used:
        raise PlanError(NO_HEAD.format(f"{_last(module)} has no trained linear layer (nn.Linear)"))
    place, own = used[-1]
    if [head for head, _ in used].count(place) > 1 or _tied(module, layers[place]):
        raise PlanError(NO_HEAD.format("the last linear layer, or its weight, is used more than once"))
    if loss == "cross_entropy" and outputs.shape[:-1] != batch.y.shape:
        raise PlanError(NO_HEAD.format(f"the last axis of outputs of shape {tuple(outputs.shape)} is not the classes"))
    forms = [own, *([F.log_softmax(own, -1)] if loss == "cross_entropy" else [])]
    if not any(torch.equal(form.reshape(-1), outputs.reshape(-1)) for form in forms):
        raise PlanError(NO_HEAD.format("the model's outputs are not those of its last linear layer"))
    return place


def _last(module: nn.Module) -> str:
    return type(module).__name__


def _tied(module: nn.Module, layer: nn.Linear) -> bool:
    """Whether another part of the module has one of the layer's parameters."""
    own = {id(parameter) for parameter in layer.parameters()}
    return any(id(p) in own for part in module.modules() if part is not layer for p in part.parameters(recurse=False))


def rows(tensors: Sequence[Tensor]) -> F64:
    return torch.cat([tensor.detach().to("cpu", torch.float64) for tensor in tensors]).numpy()
