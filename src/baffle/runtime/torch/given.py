"""A module that a user hands over as an object: how trained weights return into it, and what it says."""

from copy import deepcopy

import numpy as np
import torch
from torch import nn

from baffle.core.arrays import F32
from baffle.core.samples import Array, Samples, count, describe, pieces, take
from baffle.errors import ModelError, PlanError
from baffle.plan.functions import calling
from baffle.runtime.torch.tensors import as_tensors, call

ROWS_AT_ONCE = 256
"""Samples that run through the module together."""


def require_module(module: object) -> nn.Module:
    if not isinstance(module, nn.Module):
        raise PlanError(f"model: expected an nn.Module or the path of an ONNX file, got {type(module).__name__}")
    return module


def restored(module: nn.Module, trained: nn.Module, weights: F32) -> nn.Module:
    """A copy of a module, whole, with these weights in what is trained in `trained`, which has the same parameters."""
    copy = deepcopy(module)
    names = {name for name, parameter in trained.named_parameters() if parameter.requires_grad}
    targets = [parameter for name, parameter in copy.named_parameters() if name in names]
    expected = sum(parameter.numel() for parameter in targets)
    if expected != len(weights):
        raise ModelError(
            f"model: it has {expected:,} weights to train, but the run has {len(weights):,}; give the run's own model"
        )
    start = 0
    with torch.no_grad():
        for parameter in targets:
            numbers = torch.from_numpy(np.array(weights[start : start + parameter.numel()]))
            parameter.copy_(numbers.view_as(parameter))
            start += parameter.numel()
    return copy


@torch.inference_mode()
def outputs(module: nn.Module, x: Samples) -> Array:
    """What a module says in evaluation mode, a row for each sample. Its parts' modes are as before afterwards."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        with calling(f"model: on samples of {describe(x)}, {type(module).__name__}"):
            rows = [call(module, as_tensors(take(x, here))).float().numpy() for here in pieces(count(x), ROWS_AT_ONCE)]
    finally:
        for part, mode in modes.items():
            part.training = mode
    return np.concatenate(rows)
