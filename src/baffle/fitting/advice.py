"""`baffle.tuned` and `baffle.costs`: what `baffle tune` and `baffle plan` say, about a fit."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baffle.fitting.fit import GivenPlan, objects_of
from baffle.fitting.given_model import Function
from baffle.measuring.costs import costs as costs_of
from baffle.measuring.duration import measure_duration
from baffle.plan import change
from baffle.tune.tuning import Tuned, tune

if TYPE_CHECKING:
    from torch import nn


def tuned(
    model: "nn.Module | str | Path",
    clients: Any,
    *,
    loss: str | Function = "cross_entropy",
    train: str | Sequence[str] = "all",
    plan: GivenPlan = None,
    progress: bool = True,
) -> Tuned:
    """Choose σ, rate, K and batch for a fit by short trials on its training data, as `baffle tune` does for a plan
    (docs/tuning.md). `plan` in the result is what `baffle.fit` takes; `lines()` has the reasons.

    >>> advice = baffle.tuned(model, clients, plan={"rounds": 300})
    >>> run = baffle.fit(model, clients, plan=advice.plan)
    """
    with objects_of(model, clients, loss, train, plan) as (objects, wanted, _):
        words = (lambda words, done, _of: print(f"round {done}  {words}")) if progress else lambda *_: None  # noqa: T201
        advice = tune(objects.settled(wanted), tell=words, load=objects.trials)
    return replace(advice, plan=change(wanted, {reason.key: reason.after for reason in advice.reasons}))


def costs(
    model: "nn.Module | str | Path",
    clients: Any,
    *,
    loss: str | Function = "cross_entropy",
    train: str | Sequence[str] = "all",
    plan: GivenPlan = None,
) -> dict[str, Any]:
    """What a fit will cost: bytes, forward passes, memory, expected alignment, advice, and seconds on this machine, as
    `baffle plan --json` has them.

    >>> baffle.costs(model, clients, plan={"probe.k": 200})["seconds"]
    """
    with objects_of(model, clients, loss, train, plan) as (_, _, task):
        return asdict(costs_of(task)) | {"seconds": round(measure_duration(task).total, 2)}
