"""Settles what a plan leaves open about its probes, by what they cost and take on this machine."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from baffle.core.directions import DISTRIBUTIONS, OUTER
from baffle.core.ports import Runtime
from baffle.core.supports import rows_of
from baffle.errors import PlanError
from baffle.plan import Plan
from baffle.runtime.model import require_own_shapes
from baffle.task.choice import OPEN, Price, Settled, measure_prices, quickest_way, seconds_of, told
from baffle.task.micro_batch import RULE, SIZES, quickest, require_separate_samples
from baffle.task.server_task import ServerTask
from baffle.task.sharing import share_passes


def settle_probes(task: ServerTask, largest: int, *, given: bool) -> ServerTask:
    """The task with the settings of probes that depend on what they cost and take here. `given`: the plan itself says
    how large micro-batches are."""
    if task.plan.probe.supports == "auto":
        task = _chosen(task, largest, given=given)
    size = samples_at_once(task.plan, largest)
    task = _within_memory(_measured(_with_shapes(task), size, given=given), size, given=given)
    return _shared(_laid_out(task, size), size)


def _chosen(task: ServerTask, largest: int, *, given: bool) -> ServerTask:
    """The task with the directions that are the quickest to a scalar."""
    prices = prices_of(task, largest, given=given)
    way = quickest_way(prices)
    remark = f'probe.supports = "auto" chose {way} directions; CPU time of a scalar: {told(seconds_of(prices))}'
    return replace(task.with_probe(**prices[way].settings), remarks=(*task.remarks, remark))


def prices_of(task: ServerTask, largest: int, *, given: bool = False) -> dict[str, Price]:
    """What a scalar of one client costs here along each kind of directions that the model allows. Of clients that are
    stacked it is a client's part of a full micro-batch."""

    def settle(settings: Mapping[str, object]) -> Settled:
        settled = settle_probes(task.with_probe(**{**OPEN, **settings}), largest, given=given)
        return Settled(settled.plan, settled.runtime())

    own = task.plan.federation.batch or largest
    rows = max(own, min(samples_at_once(task.plan, largest), max(SIZES)))
    with task.model.one_thread_each():
        prices = measure_prices(task.plan.probe, settle, task.initial_weights(), task.source.example(rows))
    return {way: price._replace(seconds=price.seconds * own / rows) for way, price in prices.items()}


def require_stackable(task: ServerTask) -> None:
    """Refuse to stack the clients of a model or a loss that cannot tell their samples apart."""
    if task.plan.probe.stacked:
        with task.model.one_thread_each():
            runtime = partial(_with_micro_batch, task.with_probe(together=1))
            require_separate_samples(runtime, task.initial_weights(), task.source.example(8))


def samples_at_once(plan: Plan, largest: int) -> int:
    """The samples of a probe: those of one client, or of all clients of a round if they are stacked."""
    return (plan.federation.batch or largest) * (plan.per_round if plan.probe.stacked else 1)


def _with_micro_batch(task: ServerTask, size: int) -> Runtime:
    return task.with_probe(micro_batch=size).runtime()


def _measured(task: ServerTask, size: int, *, given: bool) -> ServerTask:
    """The task with the fastest size of micro-batches, if its batches are larger than the rule's size."""
    if given or size <= RULE:
        return task
    with task.model.one_thread_each():
        batch = task.source.example(min(size, max(SIZES)))
        fastest = quickest(partial(_with_micro_batch, task), task.initial_weights(), batch)
    return task.with_probe(micro_batch=fastest)


def _within_memory(task: ServerTask, size: int, *, given: bool) -> ServerTask:
    """The task with micro-batches small enough for probe.memory_mb."""
    probe = task.plan.probe
    if not probe.memory_mb:
        return task
    if not task.runs_whole():
        raise PlanError(
            "probe.memory_mb: only whole forward passes have a bound, but these probes keep activations of a batch; "
            'leave it out, or set probe.supports = "dense" (with a frozen backbone, train all of the model)'
        )
    wanted = min(probe.micro_batch, size)
    alone = task.with_probe(together=1).footprint()  # directions share what is left
    return task.with_probe(micro_batch=alone.within(probe.memory_mb, wanted, given=given))


def _laid_out(task: ServerTask, size: int) -> ServerTask:
    """The task with its directions shared out among parts of the model, according to what a direction costs there."""
    probe = task.plan.probe
    if probe.supports == "dense" or probe.layout:
        return task
    layout = task.model.layout(probe, task.source.example(size))
    return task.with_probe(layout=tuple(rows_of(layout)))


def _shared(task: ServerTask, size: int) -> ServerTask:
    """The task with the number of outer directions that share a forward pass."""
    probe = task.plan.probe
    if probe.distribution != OUTER or not probe.moves_whole_models or probe.together == 1:
        return task
    room = task.footprint().room(probe.memory_mb) if probe.memory_mb else None
    count, remark = share_passes(task.model, probe, task.source.example(min(size, probe.micro_batch)), room)
    return replace(task.with_probe(together=count), remarks=(*task.remarks, *([remark] if remark else [])))


def _with_shapes(task: ServerTask) -> ServerTask:
    """The task with the shapes of the model's tensors in its plan, if its directions are outer products."""
    probe = task.plan.probe
    if probe.distribution != OUTER or task.plan.estimator != "probe":
        return task
    shapes = task.model.shapes()
    if shapes is None:
        raise PlanError(
            "probe.distribution: this runtime does not know the shapes of its models' tensors; expected one of "
            f"{', '.join(map(repr, DISTRIBUTIONS))}, got {probe.distribution!r}"
        )
    require_own_shapes(probe, shapes)
    return task.with_probe(shapes=shapes)
