"""Losses on PyTorch: BAFFLE's own, and functions of the user's own."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from baffle.core.samples import PADDING
from baffle.errors import PlanError
from baffle.plan import Plan
from baffle.plan.functions import calling, own_function
from baffle.plan.tasks import is_own

TorchCriterion = Callable[[Tensor, Tensor], Tensor]
"""Model outputs and labels → one loss per sample, or their mean."""


def cross_entropy(output: Tensor, labels: Tensor) -> Tensor:
    """The class axis is the last one if all others are those of the labels, and else axis 1. A sample's loss is the
    mean over its positions, without padding."""
    if labels.ndim == 1 and output.ndim == 2:
        return F.cross_entropy(output, labels, reduction="none")
    if output.shape[:-1] == labels.shape:
        output = output.movedim(-1, 1)
    losses = F.cross_entropy(output, labels, ignore_index=PADDING, reduction="none").double()
    counted = (labels != PADDING).flatten(1).sum(1)
    return losses.flatten(1).sum(1) / counted.clamp(min=1)


def mse(output: Tensor, target: Tensor) -> Tensor:
    return _differences(output, target).square().mean(1)


def mae(output: Tensor, target: Tensor) -> Tensor:
    return _differences(output, target).abs().mean(1)


def bce(output: Tensor, target: Tensor) -> Tensor:
    """Binary cross-entropy of logits and targets between 0 and 1."""
    logits, targets = _side_by_side(output, target)
    return F.binary_cross_entropy_with_logits(logits.double(), targets.double(), reduction="none").mean(1)


def _differences(output: Tensor, target: Tensor) -> Tensor:
    numbers, targets = _side_by_side(output, target)
    return numbers.double() - targets.double()


def _side_by_side(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Both as rows of a sample's numbers, so that a target of shape (n,) fits an output of (n, 1)."""
    return output.reshape(len(output), -1), target.reshape(len(output), -1)


CRITERIA: Mapping[str, TorchCriterion] = {"cross_entropy": cross_entropy, "mse": mse, "mae": mae, "bce": bce}


def criterion_of(plan: Plan) -> TorchCriterion:
    """The plan's loss."""
    name = plan.task.loss
    return own_criterion(name, own_function("task.loss", name)) if is_own(name) else CRITERIA[name]


def own_criterion(name: str, function: Callable[[Any, Any], Any]) -> TorchCriterion:
    """A function of the user's own, which may compute anything from outputs and labels, as a loss. It need not give a
    tensor, and need not have a derivative."""

    def criterion(output: Tensor, labels: Tensor) -> Tensor:
        with calling(f"task.loss: {name}"):
            losses = function(output, labels)
        try:
            losses = torch.as_tensor(losses)
        except (TypeError, ValueError, RuntimeError):
            raise PlanError(f"task.loss: {name} {EXPECTED}, got {type(losses).__name__}") from None
        if losses.shape not in ((), (len(output),)):
            raise PlanError(f"task.loss: {name} {EXPECTED}, got shape {tuple(losses.shape)} for {len(output)} samples")
        return losses

    return criterion


EXPECTED = "must return one loss per sample, or their mean"
