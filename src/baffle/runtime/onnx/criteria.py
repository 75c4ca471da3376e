"""Losses on ONNX Runtime: a graph holds BAFFLE's own; functions of the user's own are applied to its outputs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from baffle.core.samples import Array, Labels
from baffle.errors import ModelError, PlanError
from baffle.plan import Plan
from baffle.plan.functions import calling, own_function
from baffle.plan.tasks import is_own
from baffle.runtime.onnx.model_folder import Manifest, graph_loss

NumpyCriterion = Callable[[Array, Labels], float]
"""Model outputs and labels → the mean loss."""


def criterion_of(plan: Plan) -> NumpyCriterion | None:
    """The plan's loss if it is a function of the user's own; any other is in the graph."""
    name = plan.task.loss
    return own_criterion(name, own_function("task.loss", name)) if is_own(name) else None


def own_criterion(name: str, function: Callable[[Any, Any], Any]) -> NumpyCriterion:
    """A function of the user's own, which may compute anything from outputs and labels, as a loss."""
    expected = f"task.loss: {name} must return one loss per sample, or their mean"

    def criterion(outputs: Array, labels: Labels) -> float:
        with calling(f"task.loss: {name}"):
            returned = function(outputs, labels)
        try:
            losses = np.asarray(returned, np.float64)
        except (TypeError, ValueError):
            raise PlanError(f"{expected}, got {type(returned).__name__}") from None
        if losses.shape not in ((), (len(outputs),)):
            raise PlanError(f"{expected}, got shape {losses.shape} for {len(outputs)} samples")
        return float(losses.mean())

    return criterion


def require_loss(plan: Plan, manifest: Manifest, where: Path) -> None:
    """Refuse a graph that holds another loss than the plan asks for."""
    wanted = graph_loss(plan.task.loss)
    if manifest.loss != wanted:
        raise ModelError(
            f'the graph in {where} holds the loss "{manifest.loss}", but task.loss is "{plan.task.loss}": expected '
            f'"{wanted}"; export it again from this plan, or with --loss {wanted}'
        )
