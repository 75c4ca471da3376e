"""What the server of a networked run settles before it asks anybody: no client's claim moves another's scale."""

from collections.abc import Mapping
from math import comb

from baffle.errors import PlanError
from baffle.plan import Plan
from baffle.schedule import tiers_of

N_MAX = 1000
"""How many samples a client counts for at most, if the plan does not say."""

UNLUCKY = 2.0**-20
"""The most probability with which the liars may outnumber the bound in some sum of a run."""


def tiers_for(plan: Plan, affords: Mapping[int, int]) -> tuple[int, ...]:
    """How many directions each client evaluates: what the plan gives it or, if it affords less, the largest of the
    plan's tiers that it affords. A client that affords none of them has the smallest, and refuses."""
    tiers = tiers_of(plan)
    steps = sorted({plan.probe.k, *(tier.k for tier in plan.federation.tiers)})
    for client, most in affords.items():
        if most and tiers[client] > most and plan.outcome_kind == "scalars":
            tiers[client] = max((k for k in steps if k <= most), default=steps[0])
    return tuple(tiers)


def require_clients_of_their_own(plan: Plan) -> None:
    """Refuse what only a simulation can do."""
    if plan.probe.stacked:
        raise PlanError(
            "probe.stacked: each client of a network has a machine of its own; leave it out, or say --set "
            "probe.stacked=false"
        )


def require_hidden_tiers(plan: Plan) -> None:
    """Refuse a plan in which fewer clients than the floor evaluate the last directions: clients would refuse to unmask
    any sum of it."""
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
    """Refuse a plan whose promises against a server that looks on or lies would not hold."""
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
    if (risk := _risk(plan)) > UNLUCKY:
        raise PlanError(
            f'secure.mode = "malicious-server" promises to hold while fewer than a third of a sum\'s clients lie. With '
            f"{plan.group_sizes[0]} of {plan.federation.clients} clients in a sum and {plan.rounds} rounds, chance "
            f"alone gathers more of them in one with probability {risk:.2g}, expected at most 2^-20; use fewer "
            "secure.groups, or federation.participation = 1"
        )


def _risk(plan: Plan) -> float:
    """The probability that in some sum of the run a third of the clients or more lie, if just fewer than a third of the
    roster do: a bound over all rounds and groups of a hypergeometric tail."""
    clients, liars = plan.federation.clients, -(-plan.federation.clients // 3) - 1
    size = plan.group_sizes[0]
    if size == clients:
        return 0.0
    too_many = -(-size // 3)
    tail = sum(comb(liars, bad) * comb(clients - liars, size - bad) for bad in range(too_many, min(liars, size) + 1))
    return min(1.0, plan.rounds * plan.secure.groups * (tail / comb(clients, size)))
