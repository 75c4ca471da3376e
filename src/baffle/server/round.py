"""One round, top to bottom: open, collect, close, apply, append. Start reading here."""

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from baffle.core.messages import Group, Outcome, RoundRequest
from baffle.core.ports import CONTRIBUTED, MISSING, Aggregation, Collected, Transport
from baffle.core.ring import Sum
from baffle.core.state import Present, ServerState, apply, within
from baffle.journal.store import Journal
from baffle.schedule import choose_groups
from baffle.server.downlink import Downlink
from baffle.trajectory import Trajectory

MOST_REFUSALS = 20  # a round's metrics keep the wording of at most this many refusals
Evaluate = Callable[[int, ServerState], Mapping[str, Any]]
"""The number of finished rounds, and the state after them → further metrics of the last round."""


@dataclass(frozen=True)
class Played:
    """A round that is over: the present after it, its metrics, and how each client ended it."""

    present: Present
    metrics: Mapping[str, Any]
    participation: Mapping[int, str]
    states: Mapping[int, bytes]  # the clients' signatures of the state before the round
    outcome: Outcome


def play_round(
    trajectory: Trajectory,
    present: Present,
    transport: Transport,
    aggregation: Aggregation,
    journal: Journal,
    downlink: Downlink,
    evaluate: Evaluate = lambda _rounds, _state: {},
) -> Played:
    """Play one round. The chain's hash covers the state after the round, so the round is applied before it is appended.
    No client learns of it before the journal holds it."""
    groups = choose_groups(trajectory, present.round)
    requests = open_round(trajectory, present, groups, downlink)

    collected = aggregation.collect(requests, transport)

    outcome = close_round(trajectory, present, collected.sums)
    state = apply(trajectory.rule, present.state, outcome)
    if not within(trajectory.plan.update.norm_max, present.state.weights, state.weights):
        outcome, state = skipped(present), present.state

    metrics = measure(outcome, collected, downlink.newcomers([*collected.events, *collected.downlink]))
    metrics |= evaluate(present.round + 1, state)
    snapshot = (present.round + 1) % trajectory.plan.run.snapshot_every == 0
    chain = journal.append(
        present.chain, outcome, state, snapshot=snapshot, metrics=metrics, participation=collected.events
    )

    downlink.delivered([client for client, event in collected.events.items() if event == CONTRIBUTED], present)
    return Played(Present(present.round + 1, state, chain), metrics, collected.events, collected.states, outcome)


def open_round(
    trajectory: Trajectory, present: Present, groups: list[list[int]], downlink: Downlink
) -> list[dict[int, RoundRequest]]:
    """The requests of each group, by client, each with what that client has missed. Clients that need the same catch-up
    share one request."""
    weights_hash = present.state.weights_hash()
    catch_ups = downlink.catch_ups([client for group in groups for client in group], present)
    requests: dict[int, RoundRequest] = {}

    def request(client: int) -> RoundRequest:
        catch_up = catch_ups[client]
        fresh = RoundRequest(present.round, trajectory.digest, present.chain, weights_hash, catch_up)
        return requests.setdefault(id(catch_up), fresh)

    return [{client: request(client) for client in group} for group in groups]


def close_round(trajectory: Trajectory, present: Present, sums: Sequence[Sum | None]) -> Outcome:
    """The outcome of a round: what the journal keeps of it. If no group has a sum, the round is skipped."""
    groups = tuple(
        Group(trajectory.key_number(present.round, number), total.totals.astype("<i4").tobytes(), total.weight)
        for number, total in enumerate(sums)
        if total
    )
    return Outcome(present.round, trajectory.plan.outcome_kind, groups) if groups else skipped(present)


def skipped(present: Present) -> Outcome:
    """The outcome of a round that changes nothing."""
    return Outcome(present.round, "skipped", ())


def measure(outcome: Outcome, collected: Collected, joined: Set[int]) -> dict[str, Any]:
    """A round's metrics. The bytes with which a client joins are counted apart from those of every round. The downlink
    also counts clients that were already sent messages of the next round."""
    sums = [total for total in collected.sums if total] if outcome.groups else []
    known = [(total, total.loss) for total in sums if total.loss is not None]
    weight, down = sum(total.weight for total, _ in known), collected.downlink
    metrics: dict[str, Any] = {
        "loss": math.fsum(loss * total.weight for total, loss in known) / weight if known else None,
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
        metrics["silent"] = collected.silent
    if collected.abstained:
        metrics["abstained"] = collected.abstained
    if collected.refusals:
        metrics["refused"] = [f"client {client}: {why}" for client, why in collected.refusals[:MOST_REFUSALS]]
    if any(collected.sums) and not outcome.groups:
        metrics["refused_update"] = True
    return metrics
