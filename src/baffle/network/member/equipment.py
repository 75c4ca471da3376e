"""What a networked client computes with: its samples, and the plan's own model or an exported one."""

from collections.abc import Callable, Collection
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from baffle.client.worker import Worker
from baffle.core.arrays import F32, I64
from baffle.data.partition import share_out
from baffle.data.sources import Source, load, weights_for
from baffle.errors import ModelError, RefusalError
from baffle.plan import Derivatives, Onnx, Plan, change, parse
from baffle.plan.sections import LARGEST
from baffle.runtime.model import require_own_layout
from baffle.trajectory import Trajectory, trajectory_of

if TYPE_CHECKING:
    from baffle.task.load import Runtimes, ShareOut, Task


class Equipment(NamedTuple):
    """What a client computes with, and the weights that it begins with, which it made or loaded itself."""

    worker: Worker
    initial: Callable[[], F32]


class Equip(Protocol):
    def __call__(self, plan: Plan, most_weights: int = LARGEST, /) -> Equipment:
        """What this client computes with in a plan; its worker evaluates all directions. A model of BAFFLE's own, or
        one in a folder, is refused before it is built or loaded if it has more weights."""


def all_its_own(plan: Plan, source: Source) -> list[I64]:
    """Every training sample in the folder is this client's, whatever its number."""
    return [np.arange(len(source.train))] * plan.federation.clients


def with_plan(
    number: int, data: Path | None, *, part: bool, runtime: str = "", derivatives: Derivatives = "probes"
) -> Equip:
    """Makes workers that run the plan's own model, on this machine's choice of a runtime unless one is named."""

    def equip(plan: Plan, most_weights: int = LARGEST) -> Equipment:
        if isinstance(plan.task.model, Onnx):
            raise ModelError("the plan's model came as ONNX; copy its folder from the server and give it as --model")
        plan = change(plan, [f'run.runtime = "{runtime}"', f'run.derivatives = "{derivatives}"'])
        task, trajectory, runtimes = _loaded(plan.to_toml(), data, share_out if part else all_its_own, most_weights)
        k, train, own = plan.probe.k, task.source.train, task.shares[number]
        worker = Worker(number, k, trajectory, train, own, runtimes.borrow, derivatives=derivatives)
        return Equipment(worker, task.initial_weights)

    return equip


def with_onnx(number: int, data: Path | None, model: Path, *, part: bool, approved: Collection[str] = ()) -> Equip:
    """Makes workers that run an exported model. Only BAFFLE's own models need no approval."""

    def equip(plan: Plan, most_weights: int = LARGEST) -> Equipment:
        from baffle.network.member.edge import edge_equipment

        return edge_equipment(plan, model, number, data, most_weights, part=part, approved=approved)

    return equip


def require_most_weights(weights: int, most: int) -> None:
    if weights > most:
        raise RefusalError(
            f"this client's policy: a model of {weights:,} weights, most_weights allows at most {most:,}"
        )


@lru_cache(maxsize=1)
def _loaded(plan: str, data: Path | None, share: "ShareOut", most_weights: int) -> "tuple[Task, Trajectory, Runtimes]":
    """What the clients of one process share. It is kept because Flower's simulation asks for it with every message."""
    from baffle.task.load import Runtimes, load_task

    wanted = parse(plan)
    source = load(wanted.task.data, data, wanted.task.pixels)
    require_most_weights(weights_for(wanted.task, source), most_weights)
    task = load_task(wanted, data, share=share, source=source)
    probe, n = task.plan.probe, len(task.initial_weights())
    if probe.layout:
        require_own_layout(probe, task.model.supports(probe, task.source.example(2)), n)
    return task, trajectory_of(task.plan, n), Runtimes(task, 1)
