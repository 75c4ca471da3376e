"""How many outer directions of a module share a forward pass, found out before a run starts."""

import warnings
from copy import deepcopy

import numpy as np
import torch
from torch import nn

from baffle.core.arrays import F32
from baffle.core.directions import OUTER, Directions, Support, dense, distribution_of
from baffle.core.ports import Batch
from baffle.core.probe import losses_along
from baffle.errors import first_line
from baffle.runtime.torch.criteria import TorchCriterion
from baffle.runtime.torch.footprint import tensor_bytes
from baffle.runtime.torch.loss import TorchLoss, weights_of

TRIED = 4
"""Directions that a pass is tried with."""

STEP, TOLERANCE = 1e-2, 1e-9
"""A pass for many directions must give the losses of one pass each, in float64, after a step of this length."""


def why_not_together(module: nn.Module, criterion: TorchCriterion, batch: Batch) -> str:
    """Why this module's directions cannot share a pass; empty if they can. All that can go wrong comes from a user's
    module, so it is tried: a warning that PyTorch would go from direction to direction is a reason, too."""
    directions, supports = _tried(module)
    weights = weights_of(module)
    exact: F32 = weights.astype(np.float64)
    alone, shared = (
        TorchLoss(deepcopy(module), criterion, dtype=torch.float64, together=together).on(batch)
        for together in (1, TRIED)
    )
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("error")
            expected = losses_along(alone, exact, directions, supports, STEP)
            got = losses_along(shared, exact, directions, supports, STEP)
    except Exception as fault:  # a user's module may raise anything
        return first_line(fault)
    if not np.allclose(got, expected, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True):
        return "a pass for many directions gives other losses than one for each; does it use PyTorch's functions alone?"
    return ""


def bytes_each(module: nn.Module, criterion: TorchCriterion, batch: Batch) -> int:
    """The peak bytes of tensors for each direction of a pass on this batch."""
    directions, supports = _tried(module)
    weights = weights_of(module)
    loss = TorchLoss(deepcopy(module), criterion, together=TRIED).on(batch)
    return max(1, tensor_bytes(lambda: losses_along(loss, weights, directions, supports, STEP)) // TRIED)


def _tried(module: nn.Module) -> tuple[Directions, tuple[Support, ...]]:
    shapes = tuple(tuple(p.shape) for p in module.parameters() if p.requires_grad and p.numel())
    directions = Directions(bytes(32), distribution_of(OUTER, shapes))
    return directions, dense(len(weights_of(module)), TRIED)
