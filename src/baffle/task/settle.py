"""Settles a plan before round 0: everything that it leaves open is filled in, one step after the other.

Simulations, servers, clients, fits, `baffle plan` and `baffle tune` all go through the same steps, so a plan that is
settled already stays as it is.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from pathlib import Path

from baffle.core.directions import DISTRIBUTIONS, OUTER, row_of, rows_of
from baffle.core.ports import Runtime
from baffle.core.rates import PARTS
from baffle.core.samples import describe
from baffle.errors import PlanError
from baffle.plan import Plan
from baffle.plan.arithmetic import own_of, source_of, try_own, vouch_for
from baffle.plan.law import DRAWN
from baffle.runtime.model import FLOAT32, require_own_head, require_own_layers, require_own_shapes
from baffle.stopwatch import Stopwatch
from baffle.task.features import Backbones, source_of_features
from baffle.task.memory import RULE, SIZES, quickest_size, require_separate_samples
from baffle.task.prices import OPEN, Price, in_words, kinds_of, quickest_kind, seconds_of, seconds_of_scalar
from baffle.task.server_task import ServerTask, explained, try_out

SHARED_PASS = 24 << 20  # bytes of tensors up to which directions share a pass: more leave the processor's cache
LARGEST_PASS = 1 << 30  # bytes of tensors that a pass may take, even if the plan asks for more directions


@dataclass(frozen=True)
class Circumstances:
    """What settling depends on besides the plan, its model and its data."""

    largest: int  # samples of the largest client
    size_is_given: bool  # whether the plan itself gives the size of micro-batches, which is refused rather than changed
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    folder: Path | None = None  # where the data is: features of a frozen backbone are kept for it
    backbones: Backbones = field(default_factory=Backbones)

    def samples_at_once(self, plan: Plan) -> int:
        """The samples of a probe: those of one client, or of all clients of a round if they are stacked."""
        return (plan.federation.batch or self.largest) * (plan.per_round if plan.probe.stacked else 1)


Step = Callable[[ServerTask, Circumstances], ServerTask]  # fills in settings of a plan, or refuses what cannot run


def settle(task: ServerTask, by: Circumstances) -> ServerTask:
    """The task with nothing left open in its plan."""
    task = reduce(lambda task, step: step(task, by), STEPS, task)
    if task.plan.estimator == "backprop":
        return task
    if task.plan.estimator == "law":
        drawn = _settle_probes(task, by)
        return replace(drawn, remarks=(*drawn.remarks, DRAWN))
    return _with_quickest_directions(task, by) if task.plan.probe.supports == "auto" else _settle_probes(task, by)


def _settle_probes(task: ServerTask, by: Circumstances) -> ServerTask:
    """The task with everything that follows from its kind of directions."""
    return reduce(lambda task, step: step(task, by), PROBE_STEPS, task)


def _with_quickest_directions(task: ServerTask, by: Circumstances) -> ServerTask:
    candidates = _candidates(task, by)
    if "dense" not in candidates:
        return _settle_probes(task.with_probe(**kinds_of(task.plan.probe)["dense"]), by)  # which says what is wrong
    prices = _prices(task, candidates, by)
    kind, words = quickest_kind(prices), in_words(seconds_of(prices))
    remark = f'probe.supports = "auto" chose {kind} directions; CPU time of a scalar: {words}'
    return replace(candidates[kind], remarks=(*candidates[kind].remarks, remark))


def prices_of(task: ServerTask, largest: int, stopwatch: Stopwatch | None = None) -> dict[str, Price]:
    """The price of each kind of directions for a settled task, whose micro-batches stay as they are."""
    by = Circumstances(largest, size_is_given=True, stopwatch=stopwatch or Stopwatch())
    return _prices(task, _candidates(task, by), by)


def _candidates(task: ServerTask, by: Circumstances) -> dict[str, ServerTask]:
    """The task along each kind of directions that its model allows."""
    found, probe = dict[str, ServerTask](), task.plan.probe
    for kind, settings in kinds_of(probe).items():
        given = {"together": probe.together} if kind == OUTER and probe.supports == "auto" else {}
        try:
            found[kind] = _settle_probes(task.with_probe(**{**OPEN, **given, **settings}), by)
        except PlanError:
            continue
    return found


def _prices(task: ServerTask, candidates: dict[str, ServerTask], by: Circumstances) -> dict[str, Price]:
    """CPU seconds of a scalar of one client for each candidate. For stacked clients, a client's part of a full
    micro-batch."""
    own = task.plan.federation.batch or by.largest
    rows = max(own, min(by.samples_at_once(task.plan), max(SIZES)))
    weights, batch = task.initial_weights(), task.source.example(rows)
    prices, kinds = dict[str, Price](), kinds_of(task.plan.probe)
    with task.model.one_thread_each():
        for kind, candidate in candidates.items():
            probe = candidate.plan.probe
            if "dense" in prices and probe.moves_whole_models and probe.together <= 1:  # a pass of the whole model each
                seconds = prices["dense"].seconds
            else:
                whole = seconds_of_scalar(candidate.plan, candidate.runtime(), weights, batch, by.stopwatch)
                seconds = whole * own / rows
            prices[kind] = Price(seconds, kinds[kind])
    return prices


def set_model(task: ServerTask, _by: Circumstances) -> ServerTask:
    """Fill in settings of [task.model] that become known when the model is loaded."""
    return task.with_section("task", model=task.model.settings)


def set_schedule(task: ServerTask, _by: Circumstances) -> ServerTask:
    """Fill in over how many rounds the rate changes."""
    update, rounds = task.plan.update, task.plan.rounds
    if update.schedule == "constant" or update.schedule_rounds:
        return task
    return task.with_section("update", schedule_rounds=max(1, rounds // PARTS.get(update.schedule, 1)))


def set_own(task: ServerTask, _by: Circumstances) -> ServerTask:
    """Fill in the hashes of the functions that weights follow from, and try these functions. Whoever has a stranger's
    plan settled has asked before."""
    vouch_for(task.plan)
    for own in own_of(task.plan):
        if not own.source:
            section, _, name = own.setting.partition(".")
            task = task.with_section(section, **{f"{name}_source": source_of(own)})
    try_own(task.plan)
    return task


def set_sizes(task: ServerTask, by: Circumstances) -> ServerTask:
    """Fill in ring.n_max, and a size of micro-batches by rule."""
    plan = task.plan
    n_max = plan.ring.n_max or (1 if plan.federation.weighting == "uniform" else by.largest)
    if plan.per_round * n_max >= 2**29:
        raise PlanError(
            f"ring.n_max: {plan.per_round} clients of up to {n_max} samples overflow the ring; set ring.n_max to "
            f'at most {(2**29 - 1) // plan.per_round} (larger clients count as that many), or weighting = "uniform"'
        )
    micro_batch = plan.probe.micro_batch or min(RULE, by.samples_at_once(plan))
    return task.with_section("ring", n_max=n_max).with_probe(micro_batch=micro_batch)


def require_fit(task: ServerTask, _by: Circumstances) -> ServerTask:
    """Try the model and the loss on two samples, so that what cannot run is refused before the run has a folder."""
    batch = task.source.example(2)
    with explained(task.plan, f"task.model cannot be built for samples: {describe(batch.x)}"):
        weights = task.initial_weights()
    try_out(task, task.runtime(FLOAT32), weights, batch)
    if task.precision != FLOAT32:
        what = f'probe.precision: this machine cannot run the model in {task.precision}, set it to "float32"'
        with explained(task.plan, what):
            task.runtime().on(batch)(weights)
    return task


def use_features(task: ServerTask, by: Circumstances) -> ServerTask:
    """If the model's front is frozen, train its head on features."""
    plan = task.plan
    halves = task.model.split(task.source.example(2))
    if halves is None:
        return task
    if plan.task.augment:
        raise PlanError(
            "task.augment: features of a frozen backbone are computed once, without augmentation; leave it out"
        )
    data = (plan.task.data, plan.task.pixels, plan.task.validation, by.folder, plan.run.features_mb, plan.run.device)
    features = partial(source_of_features, task.source, halves.front, plan.run.features_mb * 2**20)
    return replace(task, source=by.backbones.source((data, halves.front.key), features), model=halves.head)


def set_layers(task: ServerTask, _by: Circumstances) -> ServerTask:
    """Fill in the model's layers, if the optimizer has one second moment for each."""
    update = task.plan.update
    if update.moments == "weights":
        return task
    layers = task.model.layers()
    if layers is None:
        raise PlanError('update.moments: this runtime does not know the layers of its models; expected "weights"')
    require_own_layers(update, layers)
    return task.with_section("update", layers=tuple(map(row_of, layers)))


def set_noise(task: ServerTask, _by: Circumstances) -> ServerTask:
    """Fill in what follows from the plan's [privacy]. Without a clipping norm nothing follows yet."""
    return task.with_noise_of(task.plan) if task.plan.privacy.clip else task


def require_stackable(task: ServerTask, _by: Circumstances) -> ServerTask:
    """Refuse to stack the clients of a model or a loss that cannot tell their samples apart."""
    if task.plan.probe.stacked and task.plan.estimator == "probe":
        with task.model.one_thread_each():
            runtime = partial(_with_micro_batch, task.with_probe(together=1))
            require_separate_samples(runtime, task.initial_weights(), task.source.example(8))
    return task


def set_shapes(task: ServerTask, _by: Circumstances) -> ServerTask:
    """Fill in the shapes of the model's tensors, if directions are outer products."""
    probe = task.plan.probe
    if probe.distribution != OUTER:
        return task
    shapes = task.model.shapes()
    if shapes is None:
        raise PlanError(
            "probe.distribution: this runtime does not know the shapes of its models' tensors; expected one of "
            f"{', '.join(map(repr, DISTRIBUTIONS))}, got {probe.distribution!r}"
        )
    require_own_shapes(probe, shapes)
    return task.with_probe(shapes=shapes)


def set_head(task: ServerTask, _by: Circumstances) -> ServerTask:
    """Find the model's last linear layer, if its gradient is to be exact. Nobody may choose another."""
    probe = task.plan.probe
    if probe.head == "probed" or task.plan.estimator == "backprop":
        return task
    head = task.model.head(task.plan.task.loss, task.source.example(2))
    require_own_head(probe, head)
    return task.with_probe(head_at=row_of(head.support))


def set_micro_batch(task: ServerTask, by: Circumstances) -> ServerTask:
    """Fill in the fastest size of micro-batches, if batches are larger than the rule's size."""
    size = by.samples_at_once(task.plan)
    if by.size_is_given or size <= RULE:
        return task
    with task.model.one_thread_each():
        batch = task.source.example(min(size, max(SIZES)))
        runtime = partial(_with_micro_batch, task)
        return task.with_probe(micro_batch=quickest_size(runtime, task.initial_weights(), batch, by.stopwatch))


def _with_micro_batch(task: ServerTask, size: int) -> Runtime:
    return task.with_probe(micro_batch=size).runtime()


def limit_memory(task: ServerTask, by: Circumstances) -> ServerTask:
    """Make micro-batches small enough for probe.memory_mb."""
    probe = task.plan.probe
    if not probe.memory_mb:
        return task
    if not task.runs_whole():
        raise PlanError(
            "probe.memory_mb: only whole forward passes have a bound, but these probes keep activations of a batch; "
            'leave it out, or set probe.supports = "dense" (with a frozen backbone, train all of the model)'
        )
    wanted = min(probe.micro_batch, by.samples_at_once(task.plan))
    alone = task.with_probe(together=1).footprint()  # directions share what is left
    return task.with_probe(micro_batch=alone.within(probe.memory_mb, wanted, given=by.size_is_given))


def set_layout(task: ServerTask, by: Circumstances) -> ServerTask:
    """Share out directions among parts of the model, according to what a direction costs there."""
    probe = task.plan.probe
    if probe.supports == "dense" or probe.layout or task.plan.head_size == len(task.initial_weights()):
        return task
    layout = task.model.layout(probe, task.source.example(by.samples_at_once(task.plan)), by.stopwatch)
    return task.with_probe(layout=tuple(rows_of(layout)))


def share_passes(task: ServerTask, by: Circumstances) -> ServerTask:
    """Fill in how many outer directions share a forward pass. A number in the plan that the model or memory does not
    allow is refused. Without one, directions may take a pass each, and a remark says why."""
    probe = task.plan.probe
    if probe.distribution != OUTER or not probe.moves_whole_models or probe.together == 1:
        return task
    bound = LARGEST_PASS if probe.together else SHARED_PASS
    if probe.memory_mb:
        bound = min(bound, task.footprint().room(probe.memory_mb))
    batch = task.source.example(min(by.samples_at_once(task.plan), probe.micro_batch))
    count, reason = task.model.together(probe, batch, bound)
    if not probe.together:
        remark = [f"every outer direction takes a forward pass of its own: {reason}"] if reason else []
        return replace(task.with_probe(together=count), remarks=(*task.remarks, *remark))
    if reason or 1 < count < min(probe.together, probe.k):
        reason = reason or f"more than {count} of them take too much memory"
        raise PlanError(
            f"probe.together: {probe.together} outer directions cannot share a forward pass: {reason}; set it to "
            f"{count}, or leave it out"
        )
    return task


# What every task goes through, and what follows from a kind of directions, each in this order
STEPS: tuple[Step, ...] = (
    set_schedule,
    set_own,
    set_model,
    set_sizes,
    require_fit,
    use_features,
    set_layers,
    set_head,
    set_noise,
    require_stackable,
)
PROBE_STEPS: tuple[Step, ...] = (set_shapes, set_micro_batch, limit_memory, set_layout, share_passes)
