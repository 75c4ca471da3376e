"""Checks of a networked run's plan, how many directions each client evaluates, and in what a plan differs from a run's.
All this is fixed before clients join, so no client can influence another."""

from collections.abc import Mapping
from math import comb
from typing import Any

import msgspec
import numpy as np

from baffle.aggregation.client_policy import liars_among
from baffle.core.directions import grouped
from baffle.errors import PlanError, one_line
from baffle.plan import Plan, UpdateSettings
from baffle.schedule import tiers_of
from baffle.trajectory import Trajectory

N_MAX = 1000  # how many samples a client counts for at most, if the plan does not say
FREE = {"name", "rounds", "run"}  # what a plan may change in a run that has begun
MOST_DIFFERENCES, MOST_CHARACTERS = 3, 60  # how many differences are listed, and how much of a value is shown
UNLUCKY = 2.0**-20  # the most probability with which the liars may outnumber the bound in some sum of a run


def tiers_for(plan: Plan, affords: Mapping[int, int]) -> tuple[int, ...]:
    """How many directions each client evaluates in a step: what the plan gives it or, if it affords fewer in a round,
    the largest of the plan's tiers that it affords. A client that affords none of them has the smallest, and refuses.
    """
    tiers = tiers_of(plan)
    steps = sorted({plan.probe.k, *(tier.k for tier in plan.federation.tiers)})
    for client, most in affords.items():
        each = most // plan.federation.local_steps
        if most and tiers[client] > each and plan.outcome_kind == "scalars":
            tiers[client] = max((k for k in steps if k <= each), default=steps[0])
    return tuple(tiers)


def require_clients_of_their_own(plan: Plan) -> None:
    if plan.probe.stacked:
        raise PlanError(
            "probe.stacked: each client of a network has a machine of its own; leave it out, or say --set "
            "probe.stacked=false"
        )
    if plan.run.derivatives != "probes":
        raise PlanError(
            "run.derivatives: each client of a network decides for itself how it computes; leave it out, and say "
            "`baffle join --derivatives gradient` where a client can backpropagate"
        )
    if plan.task.validation:
        raise PlanError(
            "task.validation: a server holds no training samples to test on; leave it out, or give the server the "
            "samples that you keep for choosing as its test set"
        )


def require_hidden_tiers(plan: Plan) -> None:
    """Refuse a plan in which too few clients evaluate the last directions: they would unmask no sum of it."""
    if plan.secure.mode == "off":
        return
    tiers = tiers_for(plan, {})
    largest, floor = max(tiers), plan.secure.floor
    if (count := tiers.count(largest)) < floor:
        raise PlanError(
            f"federation.tiers: only {count} of {len(tiers)} clients evaluate all {largest} directions, so the server "
            f"could see their last values, and clients would refuse every round; expected at least secure.floor = "
            f"{floor} such clients: give the lower tiers smaller shares"
        )


def require_sound_terms(plan: Plan) -> None:
    """Refuse a plan whose promises against a curious or lying server would not hold, and one that is a study."""
    if plan.estimator == "law":
        raise PlanError(
            'estimator: "law" is a study of simulated clients, which backpropagate and probe nothing; expected "probe" '
            'or "backprop" in a network'
        )
    if plan.privacy.on and plan.secure.mode == "off":
        raise PlanError(
            'secure.mode = "off" voids [privacy] in a network: the server would see a vector with one client\'s part '
            'of the noise; set secure.mode = "on"'
        )
    if plan.secure.mode != "malicious-server":
        return
    if plan.run.downlink != "scalars":
        raise PlanError(
            f'run.downlink = "{plan.run.downlink}" does not go with secure.mode = "malicious-server": clients could '
            'not check the weights that they are sent; set run.downlink = "scalars"'
        )
    if plan.federation.weighting != "uniform":
        raise PlanError(
            f'federation.weighting = "{plan.federation.weighting}" does not go with secure.mode = "malicious-server": '
            "the sum of the clients' weights would tell how many samples they have; set federation.weighting = "
            '"uniform"'
        )
    if plan.federation.tiers:
        raise PlanError(
            'federation.tiers do not go with secure.mode = "malicious-server": one client and those that work with the '
            "server could be the only ones that evaluate some directions; leave them out"
        )
    if not plan.privacy.on:
        _require_changing_scalars(plan)
    if (risk := _risk(plan)) > UNLUCKY:
        raise PlanError(
            f'secure.mode = "malicious-server" promises to hold while fewer than a third of a sum\'s clients lie. With '
            f"{plan.group_sizes[0]} of {plan.federation.clients} clients in a sum and {plan.rounds} rounds, chance "
            f"alone gathers more of them in one with probability {risk:.2g}, expected at most 2^-20; use fewer "
            "secure.groups, or federation.participation = 1, or say with secure.liars that fewer clients lie"
        )


def _require_changing_scalars(plan: Plan) -> None:
    """Refuse a plan without noise whose sums over changing survivors differ by what a single client sends, exactly."""
    why, remedy = "a server that lies subtracts sums over changing clients", "or add [privacy]"
    if plan.outcome_kind == "vector":
        raise PlanError(
            'secure.mode = "malicious-server" needs scalars, a plan without [privacy] whose clients send vectors is '
            f'refused: {why}; set estimator = "probe", federation.level = "batch" and federation.seeds = "shared"'
        )
    if not plan.federation.batch:
        raise PlanError(
            f'federation.batch = 0 does not go with secure.mode = "malicious-server": {why}, and if all samples are '
            f"used in every round, the difference is exact; set a batch, {remedy}"
        )


def require_fewer_directions_than_weights(trajectory: Trajectory) -> None:
    """Refuse directions that measure a part of the weights exactly, where a server may lie and there is no noise. With
    d_s weights and K_s ≥ d_s directions within them, a sum is a solvable system of equations, whatever the salt."""
    plan = trajectory.plan
    if plan.secure.mode != "malicious-server" or plan.privacy.on:
        return
    if plan.probe.head == "exact":
        raise PlanError(
            'probe.head = "exact" does not go with secure.mode = "malicious-server": the gradient of the last layer is '
            'measured exactly in every sum; set probe.head = "probed", or add [privacy]'
        )
    numbers = grouped(trajectory.supports)
    spans = np.array(
        [(support.start, max(support.stop, support.tail[1]), len(own)) for support, own in numbers.items()]
    )
    for support, own in numbers.items():  # of units, a support may lie within another
        within = (spans[:, 0] >= support.start) & (spans[:, 1] <= support.stop)
        if (count := max(len(own), int(spans[within, 2].sum()))) >= support.size:
            raise PlanError(
                f"probe.k: {count} directions of a round touch only the {support.size} weights from {support.start} to "
                f'{support.stop} (probe.supports = "{plan.probe.supports}"), so a sum measures these exactly, which '
                'does not go with secure.mode = "malicious-server"; expected fewer directions than weights: lower '
                'probe.k, set probe.supports = "dense", or add [privacy]'
            )


def _risk(plan: Plan) -> float:
    """The probability that in some sum of the run more clients lie than the sum stands, if as many of the roster do as
    the plan allows: a bound over all rounds and groups of a hypergeometric tail."""
    clients, most = plan.federation.clients, plan.secure.liars
    liars = liars_among(clients, most)

    def tail(size: int) -> float:
        too_many = range(liars_among(size, most) + 1, min(liars, size) + 1)
        return sum(comb(liars, bad) * comb(clients - liars, size - bad) for bad in too_many) / comb(clients, size)

    return min(1.0, plan.rounds * plan.secure.groups * max(map(tail, plan.group_sizes)))


# A plan as a user gave it, and the settled plan of a run


def with_places(plan: Plan, places: int) -> Plan:
    """The plan with so many places for clients. An empty place counts as a client that is away."""
    return msgspec.structs.replace(plan, federation=msgspec.structs.replace(plan.federation, clients=places))


def differences(given: Plan, settled: Plan) -> str:
    """In what a given plan differs from a run's, as part of a sentence: "probe.k is 20 there and 50 here". Empty if it
    is the run's plan. It may differ in what it leaves open, in how long the run is, and in `run.*`."""
    here, there = _settings(_settled_like(given, settled)), _settings(settled)
    differing = sorted(name for name in here.keys() & there.keys() if here[name] != there[name])
    values = [(name, *(one_line(settings[name], MOST_CHARACTERS) for settings in (there, here))) for name in differing]
    listed = [f"{name} is {theirs} there and {own} here" for name, theirs, own in values]
    more = len(listed) - MOST_DIFFERENCES
    return ", ".join([*listed[:MOST_DIFFERENCES], *([f"and {more} more"] if more > 0 else [])])


def _settled_like(given: Plan, settled: Plan) -> Plan:
    """The given plan, with what it leaves open taken from the settled one."""
    task, ring, probe, federation = given.task, given.ring, given.probe, given.federation
    if probe.supports == "auto":
        chosen = {name: getattr(settled.probe, name) for name in ("supports", "distribution")}
        probe = msgspec.structs.replace(probe, **chosen)
    model, privacy = task.model, given.privacy
    if type(model) is type(settled.task.model):
        names = model.unsettled()
        model = msgspec.structs.replace(model, **{name: getattr(settled.task.model, name) for name in names})
    if privacy.on:  # the noise may follow from a target
        noise, sharers = privacy.noise or settled.privacy.noise, privacy.sharers or settled.privacy.sharers
        factor = privacy.head_factor or settled.privacy.head_factor
        privacy = msgspec.structs.replace(privacy, noise=noise, sharers=sharers, head_factor=factor)
    return msgspec.structs.replace(
        given,
        task=msgspec.structs.replace(task, model=model),
        ring=msgspec.structs.replace(ring, n_max=ring.n_max or settled.ring.n_max),
        probe=msgspec.structs.replace(
            probe,
            micro_batch=probe.micro_batch or settled.probe.micro_batch,
            layout=probe.layout or settled.probe.layout,
            shapes=probe.shapes or settled.probe.shapes,
            head_at=probe.head_at if any(probe.head_at) else settled.probe.head_at,
            together=probe.together or settled.probe.together,
            distribution_source=probe.distribution_source or settled.probe.distribution_source,
        ),
        privacy=privacy,
        update=_left_open(
            given.update, settled.update, "layers", "schedule_rounds", "optimizer_source", "schedule_source"
        ),
        federation=msgspec.structs.replace(federation, tiers=federation.tiers or settled.federation.tiers),
    )


def _left_open(given: UpdateSettings, settled: UpdateSettings, *names: str) -> UpdateSettings:
    return msgspec.structs.replace(given, **{name: getattr(given, name) or getattr(settled, name) for name in names})


def _settings(plan: Plan) -> dict[str, str]:
    """Every setting that a run keeps, by its dotted name, as JSON. Models of two kinds differ at least in `name`."""
    settings: dict[str, str] = {}

    def add(table: dict[str, Any], path: str) -> None:
        for name, value in table.items():
            if isinstance(value, dict):
                add(value, f"{path}{name}.")
            else:
                settings[f"{path}{name}"] = msgspec.json.encode(value).decode()

    add({name: value for name, value in msgspec.to_builtins(plan).items() if name not in FREE}, "")
    return settings
