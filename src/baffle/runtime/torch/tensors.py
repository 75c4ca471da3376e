"""The tensors that this runtime passes around."""

from typing import TypeAlias

from torch import Tensor, nn

MicroBatch: TypeAlias = tuple[Tensor, Tensor]
"""Samples that run through the model together, and their labels."""


def trained_parameters(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]
