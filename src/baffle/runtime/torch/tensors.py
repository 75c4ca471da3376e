"""The tensors that this runtime passes around."""

from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from baffle.core.samples import Samples, each
from baffle.errors import ModelError

Inputs: TypeAlias = Tensor | tuple[Tensor, ...] | dict[str, Tensor]
"""Samples as tensors: one, a tuple, or a dict of them."""

MicroBatch: TypeAlias = tuple[Inputs, Tensor]  # samples that run through the model together, and their labels


def trained_parameters(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def as_tensors(x: Samples, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32) -> Inputs:
    """Samples on a device, floats in this type. Integers keep theirs: in bfloat16, token 801 would become 800."""

    def tensor(array: Any) -> Tensor:
        # PyTorch takes no array with negative strides, and warns about one that must not be written to.
        array = np.require(array, requirements=["C", "W"])
        return torch.from_numpy(array).to(device, dtype if array.dtype.kind == "f" else None)

    return each(tensor, x)


def call(module: nn.Module, x: Inputs) -> Tensor:
    """The module's output: module(x), module(*x) for a tuple, module(**x) for a dict."""
    if isinstance(x, tuple):
        return only_tensor(module(*x))
    return only_tensor(module(**x) if isinstance(x, dict) else module(x))


def only_tensor(output: object) -> Tensor:
    """A module's output: one tensor, or an object whose `logits` are one, as models of Hugging Face give."""
    output = getattr(output, "logits", output)
    if not isinstance(output, Tensor):
        raise ModelError(
            f"task.model: the model gives a {type(output).__name__}, expected one tensor; return the outputs alone"
        )
    return output
