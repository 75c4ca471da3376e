"""The [privacy] section of a plan: how much noise is certain to be in a sum, and the ε that follows.

A sum has at least u survivors, or it is not computed; at most f of them may be liars that add no noise. So u − f
clients are certain to add noise, and each adds one part in u − f of the variance that the plan promises.
"""

import math
from dataclasses import replace

import msgspec

from baffle.aggregation.client_policy import liars_among, quorum
from baffle.errors import PlanError
from baffle.plan.plan import Plan
from baffle.privacy.accounting import noise_for, spent
from baffle.privacy.ring import PrivateRing

COARSEST = 4  # the least steps of the ring for each value of a vector, in the root mean square

USUAL_EPSILON, USUAL_DELTA = 8.0, 1e-5
"""Where a server may lie: what all private runs may cost a client whose policy does not say."""

LEAST_NOISE = 1e-4  # a run with less noise would cost an ε of millions
LEAST_CLIP, LARGEST_CLIP = 1e-40, 1e40  # plausible clipping norms. Beyond them, the ring would have no scale
USUAL_FINENESS = 1 << 20  # an estimate of the bound on a vector's length in steps of the ring, until it is known


def least_survivors(plan: Plan) -> int:
    """u: the fewest clients over which a sum is unmasked. In "malicious-server" mode, a sum needs a quorum of its
    possible clients. Otherwise the threshold falls with the clients that are present, but not below the plan's."""
    secure = plan.secure
    if secure.mode != "malicious-server":
        return max(secure.floor, secure.threshold)
    return max(secure.floor, secure.threshold, quorum(plan.group_sizes[0], secure.liars))


def certain_sharers(plan: Plan) -> int:
    """u − f: the number of clients of a sum that are certain to add noise, at least one. In "malicious-server" mode,
    as many of a sum's possible clients are liars as the sum itself stands."""
    secure = plan.secure
    if secure.mode != "malicious-server":
        return least_survivors(plan)
    sizes, liars = {max(size, 1) for size in plan.group_sizes}, secure.liars
    return min(max(secure.floor, secure.threshold, quorum(m, liars)) - liars_among(m, liars) for m in sizes)


def check_privacy(plan: Plan) -> None:
    """Raise a PlanError for settings that would void a plan's privacy."""
    privacy, federation = plan.privacy, plan.federation
    if not privacy.on:
        for name in ("clip", "sharers"):
            if getattr(privacy, name):
                raise PlanError(f"privacy.{name} without noise is no privacy: expected privacy.noise or .epsilon, too")
        return
    if 0 < privacy.noise < LEAST_NOISE:
        raise PlanError(f"privacy.noise: expected at least {LEAST_NOISE:g}, got {privacy.noise:g}, which hides nothing")
    if privacy.clip and not LEAST_CLIP <= privacy.clip <= LARGEST_CLIP:
        raise PlanError(
            f"privacy.clip: expected {LEAST_CLIP:g} to {LARGEST_CLIP:g}, the length of a usual client's vector, got "
            f"{privacy.clip:g}; leave it out, and `baffle plan` proposes one"
        )
    if federation.weighting != "uniform":
        raise PlanError(
            'federation.weighting: a private run needs "uniform", got "samples", which lets a client count by how '
            "many samples it has and tells the sum of these numbers"
        )
    if federation.level != "batch":
        raise PlanError(
            'federation.level: a private run needs "batch", got "epoch"; the clipping of whole local trainings has not '
            "been tried"
        )
    if federation.seeds != "shared":
        raise PlanError(
            'federation.seeds: a private run needs "shared", got "own", with which clients send a number for every '
            "weight instead of K, and noise on each"
        )
    if (least := least_survivors(plan)) > plan.group_sizes[0]:
        raise PlanError(
            f"secure.floor: a private sum needs {least} clients for its noise, but has {plan.group_sizes[0]} at most; "
            "use fewer secure.groups or more federation.participation, or a lower floor"
        )
    certain = certain_sharers(plan)
    if privacy.sharers > certain:
        raise PlanError(
            f"privacy.sharers: expected at most {certain}, the clients of a sum that are certain to add noise with "
            f"these settings of [secure], got {privacy.sharers}"
        )


def scalars_of(plan: Plan, n: int) -> int:
    """The number of directions of a step, for a model of n weights: none if an exact head is all of it."""
    return 0 if plan.head_size == n else plan.probe.k


def length_of(plan: Plan, n: int) -> int:
    """The number of values in a client's vector, for a model of n weights."""
    steps = plan.federation.local_steps
    return n if plan.outcome_kind == "vector" else steps * (scalars_of(plan, n) + plan.head_size)


def head_factor(plan: Plan, n: int) -> float:
    """How many times the numbers of an exact head count: √K, so that they have the noise of a rebuilt gradient."""
    return plan.privacy.head_factor or math.sqrt(max(1, scalars_of(plan, n)))


def private_ring(plan: Plan, n: int) -> PrivateRing:
    """The ring of a private plan with all settings filled in, for a model of n weights."""
    privacy = plan.privacy
    if not privacy.clip:
        raise PlanError(
            "privacy.clip is 0: expected the bound on the length of a client's vector; `baffle plan` proposes one"
        )
    for name in ("noise", "sharers"):
        if not getattr(privacy, name):
            raise PlanError(f"privacy.{name} is 0: expected what a run writes into its own plan.toml when it starts")
    layout = plan.head_size, privacy.head_factor or 1.0, plan.federation.local_steps
    ring = PrivateRing(plan.per_round, privacy.clip, privacy.noise, privacy.sharers, length_of(plan, n), *layout)
    if ring.delta_2 < COARSEST * math.sqrt(ring.length):
        raise PlanError(
            f"privacy.noise: {privacy.noise:g} times the clipping norm, one part in {privacy.sharers} from each of "
            f"{plan.per_round} clients, leaves the ring too coarse for {ring.length:,} values; raise secure.floor, or "
            "use less noise"
        )
    return ring


def with_noise(plan: Plan, n: int) -> Plan:
    """The plan with everything filled in that follows from [privacy], for a model of n weights. A noise that is already
    set must suffice for the target ε, if there is one."""
    if not plan.privacy.on:
        return plan
    plan = _with(plan, sharers=plan.privacy.sharers or certain_sharers(plan))
    if plan.head_size:
        plan = _with(plan, head_factor=head_factor(plan, n))
    if not plan.privacy.noise:
        return _with(plan, noise=_least_noise(plan, n))
    found, privacy = epsilon_of(plan, n, plan.rounds), plan.privacy
    if privacy.epsilon and found > privacy.epsilon:
        raise PlanError(
            f"privacy.epsilon: {plan.rounds} rounds with noise {privacy.noise:g} come to ε = {found:.4g} at δ = "
            f"{privacy.delta:g}, more than {privacy.epsilon:g}; use fewer rounds, leave privacy.noise out of a new "
            "run's plan, or set a larger ε"
        )
    return plan


def epsilon_of(plan: Plan, n: int, rounds: int) -> float:
    """ε, at the plan's δ, of a client that takes part in `rounds` rounds."""
    return spent([replace(private_ring(plan, n).release, count=rounds)], plan.privacy.delta)


def _least_noise(plan: Plan, n: int) -> float:
    """The least noise with which all rounds together keep to the plan's ε. The ring's fineness depends on the noise,
    and the noise depends slightly on the fineness."""
    privacy, length, noise, fineness = plan.privacy, length_of(plan, n), 0.0, USUAL_FINENESS
    while True:
        try:
            needed = noise_for(privacy.epsilon, privacy.delta, plan.rounds, delta_2=fineness, dimension=length)
        except ValueError as fault:
            raise PlanError(f"privacy.epsilon: {fault}; expected a larger one, or fewer rounds") from None
        if needed <= noise:
            return noise
        noise = needed
        fineness = private_ring(_with(plan, noise=noise), n).delta_2


def _with(plan: Plan, **settings: float) -> Plan:
    return msgspec.structs.replace(plan, privacy=msgspec.structs.replace(plan.privacy, **settings))
