"""Checks across settings: combinations that make no sense although each value alone is valid."""

import math
from collections.abc import Sequence

from baffle.aggregation.client_policy import ClientPolicy, liars_among
from baffle.core.directions import OUTER, distribution_names
from baffle.core.rates import SCHEDULES
from baffle.core.update import OPTIMIZERS
from baffle.errors import PlanError
from baffle.plan.law import check_law
from baffle.plan.plan import Plan
from baffle.plan.privacy import check_privacy
from baffle.plan.sections import MobileNet, Onnx, TaskSettings, UpdateSettings
from baffle.plan.tasks import LOSSES, METRICS, is_own, metrics_of, short


def check(plan: Plan) -> None:
    """Raise a PlanError for the first settings that do not fit together."""
    update, probe = plan.update, plan.probe
    for key, name, source, known in (
        ("probe.distribution", probe.distribution, probe.distribution_source, distribution_names()),
        ("update.optimizer", update.optimizer, update.optimizer_source, OPTIMIZERS),
        ("update.schedule", update.schedule, update.schedule_source, SCHEDULES),
    ):
        if name not in known and not is_own(name):
            own = 'or "package.module:function"'
            raise PlanError(f"{key}: expected one of {', '.join(map(repr, known))} {own}, got {name!r}")
        if source and not is_own(name):
            raise PlanError(f"{key}_source: only a function of your own has one, got {key} = {name!r}; leave it out")
    _check_task(plan.task)
    _check_onnx(plan)
    _check_runtime(plan)
    check_law(plan)
    _check_derivatives(plan)
    _check_federation(plan)
    _check_probe(plan)
    _check_update(plan.update)
    _check_secure(plan)
    check_privacy(plan)


def _check_task(task: TaskSettings) -> None:
    """Check the names of losses and metrics, and that they suit each other."""
    for key, name, known in (("loss", task.loss, LOSSES), *(("metrics", name, METRICS) for name in task.metrics)):
        if name not in known and not is_own(name):
            raise PlanError(
                f'task.{key}: expected one of {", ".join(map(repr, known))} or "package.module:function", got {name!r}'
            )
    suitable = LOSSES[task.loss].metrics if task.loss in LOSSES else METRICS
    for name in task.metrics:
        if not is_own(name) and name not in suitable:
            raise PlanError(
                f'task.metrics: {name!r} cannot be taken with task.loss = "{task.loss}"; expected one of '
                f'{", ".join(map(repr, suitable))} or "package.module:function"'
            )
    shown = [short(name) for name in metrics_of(task)]
    for name in shown:
        if shown.count(name) > 1 or name == "domains" or name.endswith("_last"):
            raise PlanError(
                f"task.metrics: results would hold test_{name} twice; name each metric once, and a function of your "
                "own neither domains nor …_last"
            )
    model = task.model
    trained_with = ("relu6", "none")
    if isinstance(model, MobileNet) and model.weights == "imagenet" and (model.activation, model.norm) != trained_with:
        raise PlanError(
            'task.model: ImageNet\'s weights need activation = "relu6" and norm = "none", got '
            f'{model.activation!r} and {model.norm!r}; leave these out, or set weights = "random"'
        )


def _check_onnx(plan: Plan) -> None:
    """ONNX Runtime runs a graph forward only, as a whole and in the graph's own precision."""
    if not isinstance(plan.task.model, Onnx):
        if plan.run.model:
            raise PlanError('run.model is the folder of a model that came as ONNX: expected task.model.name = "onnx"')
        return
    probe, remedy = plan.probe, "leave it out, or use a model that BAFFLE builds"
    if plan.run.derivatives != "probes":
        raise PlanError(f'run.derivatives: a model that came as ONNX has no gradient, expected "probes"; {remedy}')
    if plan.estimator != "probe":
        raise PlanError(f'estimator: a model that came as ONNX has no gradient, expected "probe"; {remedy}')
    if not probe.moves_whole_models:
        raise PlanError(
            f'probe.supports: a model that came as ONNX takes "dense" or "layers", got {probe.supports!r}; {remedy}'
        )
    if probe.precision != "float32":
        raise PlanError(
            f'probe.precision: a model that came as ONNX takes "float32", got {probe.precision!r}; {remedy}'
        )
    if probe.memory_mb:
        raise PlanError(f"probe.memory_mb: the memory of a model that came as ONNX is not known; {remedy}")


def _check_runtime(plan: Plan) -> None:
    model = plan.task.model
    if plan.run.runtime == "onnx" and (name := plan.needs_torch()):
        remedy = 'set task.init = "numpy"' if name == "task.init" else "leave one of them out"
        raise PlanError(f'run.runtime: expected "torch", because only PyTorch can follow {name}; {remedy}')
    if model.runtime and plan.run.runtime not in ("", model.runtime):
        raise PlanError(
            f'run.runtime: task.model runs on "{model.runtime}" only, got "{plan.run.runtime}"; leave it out'
        )


def _check_derivatives(plan: Plan) -> None:
    if plan.run.derivatives == "probes":
        return
    for setting, wanted, there in (
        ("estimator", 'estimator = "probe"', plan.estimator != "probe"),
        ("probe.stacked", "probe.stacked = false", plan.probe.stacked),
        ("probe.memory_mb", "probe.memory_mb = 0", plan.probe.memory_mb > 0),
    ):
        if there:
            raise PlanError(
                f'run.derivatives = "{plan.run.derivatives}" takes a backward pass in place of probes, which does not '
                f"go with this {setting}; expected {wanted}, or leave run.derivatives out"
            )


def _check_federation(plan: Plan) -> None:
    federation, own = plan.federation, plan.federation.seeds == "own"
    remedy = 'leave federation.seeds out, or set it to "shared"'
    if own and plan.estimator == "backprop":
        raise PlanError(f'federation.seeds = "own" needs estimator = "probe", got "backprop", which has none; {remedy}')
    if own and federation.level == "epoch":
        raise PlanError(
            f'federation.seeds = "own" needs level = "batch", got "epoch", where clients have their own; {remedy}'
        )
    if own and plan.secure.group_seeds == "own":
        raise PlanError(
            'federation.seeds = "own" leaves groups no directions to share: expected secure.group_seeds = "shared", '
            'got "own"; leave one of them out'
        )
    if federation.steps and federation.level == "batch":
        raise PlanError(
            f'federation.steps are local ones and need level = "epoch", got "batch" with steps = {federation.steps}; '
            "leave them out"
        )
    if federation.steps and federation.epochs != 1:
        raise PlanError(
            f"federation.steps = {federation.steps} and federation.epochs = {federation.epochs} both say how long a "
            "client trains; leave one of them out"
        )
    if federation.local_steps > 1:
        _check_local_steps(plan)
    if federation.tiers and plan.outcome_kind != "scalars":
        raise PlanError(
            'federation.tiers need level = "batch", seeds = "shared" and estimator = "probe": only scalars can be fewer'
        )
    for tier in federation.tiers:
        if tier.k >= plan.probe.k:
            raise PlanError(f"federation.tiers: a tier's k must be below probe.k = {plan.probe.k}, got {tier.k}")
    shares = math.fsum(tier.share for tier in federation.tiers)
    if shares > 1 + 1e-9:
        raise PlanError(f"federation.tiers: shares must add up to at most 1, got {shares:g}")


def _check_local_steps(plan: Plan) -> None:
    """Several steps in a round are those of the mean of all clients only if each step is linear in what clients send,
    and if clients know the state that a round begins with."""
    federation, update, optimizer = plan.federation, plan.update, plan.update.optimizer
    needs, remedy = f"federation.local_steps = {federation.local_steps}", "leave federation.local_steps out"
    if plan.outcome_kind != "scalars":
        raise PlanError(
            f'{needs} needs scalars: expected estimator = "probe", level = "batch" and seeds = "shared", got '
            f"{plan.estimator!r}, {federation.level!r} and {federation.seeds!r}; {remedy}"
        )
    if not federation.batch:
        raise PlanError(f"{needs} needs batches: expected federation.batch above 0; {remedy}")
    if plan.probe.stacked:
        raise PlanError(f"{needs} leads clients to weights of their own, so they cannot be stacked; {remedy}")
    if update.clip:
        raise PlanError(
            f"{needs}: update.clip is not linear, so the mean of the clients' steps would not be a step along their "
            "mean; leave one of them out"
        )
    if plan.run.downlink != "scalars" and optimizer != "sgd":
        raise PlanError(
            f'{needs} and update.optimizer = "{optimizer}" need run.downlink = "scalars", got "{plan.run.downlink}", '
            "with which clients do not hold the optimizer's state"
        )


def _check_secure(plan: Plan) -> None:
    smallest, largest = plan.group_sizes
    if smallest < 1:
        raise PlanError(
            f"secure.groups: expected at most {plan.per_round}, the clients of a round, got {plan.secure.groups}"
        )
    if plan.secure.mode != "off" and smallest < plan.secure.floor:
        raise PlanError(
            f"secure.floor: expected at least {plan.secure.floor} clients in a secure sum, got {smallest}; "
            'use fewer secure.groups or more federation.participation, or set secure.mode = "off" and show each '
            "client's values to the server"
        )
    liars, may_lie = plan.secure.liars, plan.secure.mode == "malicious-server"
    if liars and not may_lie:
        raise PlanError(
            f'secure.liars: only secure.mode = "malicious-server" holds against clients that work with the server, got '
            f'"{plan.secure.mode}"; leave one of them out'
        )
    if liars > (third := liars_among(plan.federation.clients)):
        raise PlanError(
            f"secure.liars: expected at most {third}, fewer than a third of {plan.federation.clients} clients, got "
            f"{liars}"
        )
    if plan.secure.mode == "off" or not plan.secure.threshold:
        return
    policy = ClientPolicy(agreement=may_lie, liars=liars)
    many = policy.graph(tuple(range(largest)), 0)
    few = many if smallest == largest else policy.graph(tuple(range(smallest)), 0)
    least, most = policy.least_threshold(many, largest), few.k + 1
    if not least <= plan.secure.threshold <= most:
        raise PlanError(
            f"secure.threshold: expected {least} to {most}, or 0 for the least of these, with {largest} clients in a "
            f"sum, got {plan.secure.threshold}"
        )


def _check_probe(plan: Plan) -> None:
    probe = plan.probe
    if probe.precision != "float32" and not probe.moves_whole_models:
        raise PlanError(
            f"probe.precision: only whole forward passes can be computed in {probe.precision}; set probe.supports = "
            '"dense" or "layers", or probe.precision = "float32"'
        )
    outer, remedy = probe.distribution == OUTER, 'leave it out, or set probe.distribution = "outer"'
    if probe.shapes and not outer:
        raise PlanError(f"probe.shapes: only outer directions have them; {remedy}")
    if probe.together and not outer:
        raise PlanError(f"probe.together: only outer directions share a forward pass; {remedy}")
    if probe.supports == "units" and outer:
        raise PlanError(
            'probe.supports: outer directions touch whole tensors; expected "dense", "layers" or "stages", got "units"'
        )
    if probe.layout and probe.supports in ("dense", "auto"):
        raise PlanError(
            f'probe.layout: {probe.supports} directions have none; leave it out, or set probe.supports = "layers"'
        )
    if probe.layout and sum(row[-1] for row in probe.layout) != probe.k:
        raise PlanError(f"probe.layout: its counts must add up to probe.k = {probe.k}")
    if not all(map(_is_support, probe.layout)):
        raise PlanError("probe.layout: every row must be [start, stop, start and stop of its tail or 0, 0, count]")
    if any(probe.head_at) and (probe.head == "probed" or not _is_support(probe.head_at)):
        raise PlanError(
            'probe.head_at: expected the place that a run with probe.head = "exact" writes into its own plan.toml when '
            "it starts; leave it out"
        )
    if probe.stacked and plan.outcome_kind != "scalars":
        raise PlanError(
            'probe.stacked needs clients at the same weights: expected estimator = "probe", level = "batch" and seeds '
            f'= "shared", got {plan.estimator!r}, {plan.federation.level!r} and {plan.federation.seeds!r}; leave it out'
        )
    if probe.stacked and not probe.moves_whole_models:
        raise PlanError(
            'probe.stacked needs whole forward passes: expected probe.supports = "dense" or "layers", got '
            f"{probe.supports!r}; leave it out"
        )


def _check_update(update: UpdateSettings) -> None:
    if update.schedule_rounds and update.schedule == "constant":
        raise PlanError("update.schedule_rounds: a constant rate needs none; leave it out, or set update.schedule")
    if update.moments == "layers" and update.optimizer != "adam":
        raise PlanError(
            f'update.moments: only "adam" has second moments, got update.optimizer = {update.optimizer!r}; leave '
            "one of them out"
        )
    if update.layers and update.moments == "weights":
        raise PlanError(
            'update.layers: moments of single weights need none; leave it out, or set update.moments = "layers"'
        )
    if not all(map(_is_support, update.layers)):
        raise PlanError("update.layers: every row must be [start, stop, start and stop of its tail or 0, 0]")


def _is_support(row: Sequence[int]) -> bool:
    start, stop, first, last = row[:4]
    return start < stop and (stop <= first < last or first == last)
