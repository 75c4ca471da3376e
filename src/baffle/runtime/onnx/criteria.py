"""Losses on ONNX Runtime: a graph holds BAFFLE's own; functions of the user's own are applied to its outputs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from baffle.core.arrays import F64
from baffle.core.samples import PADDING, Array, Labels
from baffle.errors import ModelError, PlanError
from baffle.plan import Plan
from baffle.plan.functions import calling, own_function
from baffle.plan.tasks import is_own
from baffle.runtime.onnx.model_folder import CROSS_ENTROPY, Manifest, graph_loss

NumpyCriterion = Callable[[Array, Labels], F64]
"""Model outputs and labels → one loss per sample, or their mean."""


def criterion_of(plan: Plan) -> NumpyCriterion | None:
    """The plan's loss if it is a function of the user's own; any other is in the graph."""
    name = plan.task.loss
    return own_criterion(name, own_function("task.loss", name)) if is_own(name) else None


def own_criterion(name: str, function: Callable[[Any, Any], Any]) -> NumpyCriterion:
    """A function of the user's own, which may compute anything from outputs and labels, as a loss."""
    expected = f"task.loss: {name} must return one loss per sample, or their mean"

    def criterion(outputs: Array, labels: Labels) -> F64:
        with calling(f"task.loss: {name}"):
            returned = function(outputs, labels)
        try:
            losses: F64 = np.asarray(returned, np.float64)
        except (TypeError, ValueError):
            raise PlanError(f"{expected}, got {type(returned).__name__}") from None
        if losses.shape not in ((), (len(outputs),)):
            raise PlanError(f"{expected}, got shape {losses.shape} for {len(outputs)} samples")
        return losses

    return criterion


def sample_losses(loss: str, outputs: Array, labels: Labels) -> F64:
    """One of BAFFLE's own losses, for each sample: what a graph gives the mean of."""
    rows = outputs.astype(np.float64)
    if loss == CROSS_ENTROPY:
        return _cross_entropy(rows, labels)
    numbers, targets = (array.reshape(len(rows), -1) for array in (rows, labels.astype(np.float64)))
    if loss == "bce":
        each = np.maximum(numbers, 0) - numbers * targets + np.log1p(np.exp(-np.abs(numbers)))
    else:
        each = np.abs(numbers - targets) if loss == "mae" else np.square(numbers - targets)
    means: F64 = each.mean(axis=1)
    return means


def _cross_entropy(outputs: F64, labels: Labels) -> F64:
    """The mean over a sample's positions that are not padding. The class axis is the last one if all others are those
    of the labels, and else axis 1."""
    if outputs.shape[:-1] != labels.shape:
        outputs = np.moveaxis(outputs, 1, -1)
    shifted = outputs - outputs.max(axis=-1, keepdims=True)
    logarithms = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    counted = labels != PADDING
    chosen = np.take_along_axis(logarithms, np.where(counted, labels, 0)[..., None], axis=-1)[..., 0]
    counted, losses = (array.reshape(len(labels), -1) for array in (counted, np.where(counted, -chosen, 0.0)))
    means: F64 = losses.sum(axis=1) / np.maximum(counted.sum(axis=1), 1)
    return means


def require_loss(plan: Plan, manifest: Manifest, where: Path) -> None:
    """Refuse a graph that holds another loss than the plan asks for."""
    wanted = graph_loss(plan.task.loss)
    if manifest.loss != wanted:
        raise ModelError(
            f'the graph in {where} holds the loss "{manifest.loss}", but task.loss is "{plan.task.loss}": expected '
            f'"{wanted}"; export it again from this plan, or with --loss {wanted}'
        )
