"""Which clients take part in a round, in which groups, and with how many directions: all follows from the plan."""

from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache

import numpy as np

from baffle.aggregation.client_policy import ClientPolicy
from baffle.core.seeds import Seeds, permutation
from baffle.plan import Plan
from baffle.trajectory import Trajectory


def choose_clients(trajectory: Trajectory, round_number: int) -> list[int]:
    """The clients of a round. They follow from the plan alone."""
    everyone = trajectory.plan.federation.clients
    if trajectory.plan.per_round == everyone:
        return list(range(everyone))
    order = permutation(trajectory.seeds(round_number).key("participation", round_number), everyone)
    return sorted(order[: trajectory.plan.per_round].tolist())


def choose_groups(trajectory: Trajectory, round_number: int) -> list[list[int]]:
    """The clients of a round, divided into groups that are summed together. The groups are drawn anew every round."""
    chosen = choose_clients(trajectory, round_number)
    count = trajectory.plan.secure.groups
    if count == 1:
        return [chosen]
    order = permutation(trajectory.seeds(round_number).key("groups", round_number), len(chosen)).tolist()
    return [sorted(chosen[place] for place in order[group::count]) for group in range(count)]


def key_number_of(trajectory: Trajectory, round_number: int, client: int) -> int:
    """The number of the key for a client's directions in a round. A client outside the round has the first group's."""
    if not trajectory.plan.own_seeds:
        return trajectory.key_number(round_number, 0)
    groups = choose_groups(trajectory, round_number)
    return trajectory.key_number(round_number, next((i for i, group in enumerate(groups) if client in group), 0))


def tiers_of(plan: Plan) -> list[int]:
    """K for each client. The clients are shuffled, and each slower tier gets its share of them."""
    clients = plan.federation.clients
    order = permutation(Seeds(plan.seed, b"").key("tiers"), clients)
    k = np.full(clients, plan.probe.k)
    start = 0
    share_so_far = Fraction(0)
    for tier in plan.federation.tiers:
        share_so_far += Fraction(tier.share)
        stop = round(share_so_far * clients)
        k[order[start:stop]] = tier.k
        start = stop
    return [int(directions) for directions in k]


def policy_of(trajectory: Trajectory, tiers: Mapping[int, int], salt: bytes) -> ClientPolicy:
    """What the clients of a run require of a secure sum. No party can choose the `salt`."""
    plan = trajectory.plan

    @lru_cache(maxsize=4)  # simulated clients ask for the same round, one after the other
    def groups_of(round_number: int) -> list[list[int]]:
        return choose_groups(trajectory, round_number) if round_number < plan.rounds else []

    secure, agreement = plan.secure, plan.secure.mode == "malicious-server"
    return ClientPolicy(secure.floor, secure.threshold, agreement, groups_of, tiers, salt, secure.liars)
