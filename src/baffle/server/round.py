"""One round, top to bottom: open, exchange, close, apply, append. Start reading here."""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from baffle.core.arrays import F32
from baffle.core.messages import Group, Outcome, RoundRequest
from baffle.core.ports import CONTRIBUTED, MISSING, Aggregation, Collected, Transport
from baffle.core.ring import Sum
from baffle.core.state import ServerState, apply
from baffle.journal.replay import Present
from baffle.journal.store import Journal
from baffle.schedule import choose_groups
from baffle.server.downlink import Downlink
from baffle.trajectory import Trajectory

MOST_REFUSALS = 20
"""Of so many a round's metrics keep the words."""


@dataclass(frozen=True)
class Played:
    """A round that is over: the present after it, and what is worth telling."""

    present: Present
    metrics: Mapping[str, Any]
    participation: Mapping[int, str]


def play_round(
    trajectory: Trajectory,
    present: Present,
    transport: Transport,
    aggregation: Aggregation,
    journal: Journal,
    downlink: Downlink,
) -> Played:
    """From the present to the next one. `apply` is pure: the journal holds the round before anybody builds on it."""
    groups = choose_groups(trajectory, present.round)
    requests = open_round(trajectory, present, groups, downlink)
    collected = aggregation.collect(requests, transport)
    outcome, state = close_round(trajectory, present, collected.sums)
    metrics = tell(outcome, collected, downlink.newcomers([*collected.events, *collected.downlink]))
    downlink.delivered([client for client, event in collected.events.items() if event == CONTRIBUTED], present)
    snapshot = (present.round + 1) % trajectory.plan.run.snapshot_every == 0
    chain = journal.append(
        present.chain, outcome, state, snapshot=snapshot, metrics=metrics, participation=collected.events
    )
    return Played(present.after(outcome, state, chain), metrics, collected.events)


def open_round(
    trajectory: Trajectory, present: Present, groups: list[list[int]], downlink: Downlink
) -> list[dict[int, RoundRequest]]:
    """For each client of each group the round's request, with what that client has missed. Who is to be told the same
    shares one."""
    weights_hash = present.state.weights_hash()
    catch_ups = downlink.catch_ups([client for group in groups for client in group], present)
    made: dict[tuple[int, int], RoundRequest] = {}

    def request(client: int, group: int) -> RoundRequest:
        catch_up, key = catch_ups[client], trajectory.key_number(present.round, group)
        fresh = RoundRequest(present.round, key, trajectory.digest, weights_hash, catch_up, present.skipped)
        return made.setdefault((id(catch_up), key), fresh)

    return [{client: request(client, number) for client in group} for number, group in enumerate(groups)]


def close_round(trajectory: Trajectory, present: Present, sums: Sequence[Sum | None]) -> tuple[Outcome, ServerState]:
    """What the journal keeps of a round, and what follows from it. Without a sum, or with an update beyond its cap, the
    round is skipped, and the run goes on."""
    groups = tuple(
        Group(trajectory.key_number(present.round, number), total.totals.astype("<i4").tobytes(), total.weight)
        for number, total in enumerate(sums)
        if total
    )
    if groups:
        outcome = Outcome(present.round, trajectory.plan.outcome_kind, groups)
        state = apply(trajectory.rule, present.state, outcome)
        if within(trajectory.plan.update.norm_max, present.state.weights, state.weights):
            return outcome, state
    return Outcome(present.round, "skipped", ()), present.state


def within(cap: float, before: F32, after: F32) -> bool:
    return not cap or float(np.linalg.norm(after.astype(np.float64) - before)) <= cap


def tell(outcome: Outcome, collected: Collected, joined: Set[int]) -> dict[str, Any]:
    """A round in numbers. What a client needs once, to join, is counted apart from what it needs every round; those who
    are told of the next round already count too."""
    sums = [total for total in collected.sums if total] if outcome.groups else []
    weight, down = sum(total.weight for total in sums), collected.downlink
    told: dict[str, Any] = {
        "loss": math.fsum(total.loss * total.weight for total in sums) / weight if sums else None,
        "contributors": sum(total.contributors for total in sums),
        "clipped": sum(total.clipped for total in sums),
        "uplink_bytes": sum(collected.uplink.values()),
        "replies": sum(event != MISSING for event in collected.events.values()),
        "downlink_bytes": sum(size for client, size in down.items() if client not in joined),
        "requests": len(collected.events.keys() - joined),
        "join_bytes": sum(size for client, size in down.items() if client in joined),
        "joins": len(collected.events.keys() & joined),
        "refusals": len(collected.refusals),
    }
    if collected.silent:
        told["silent"] = collected.silent
    if collected.refusals:
        told["refused"] = [f"client {client}: {why}" for client, why in collected.refusals[:MOST_REFUSALS]]
    if any(collected.sums) and not outcome.groups:
        told["refused_update"] = True
    return told
