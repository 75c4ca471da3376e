"""One round, top to bottom: open, exchange, close, apply, append. Start reading here."""

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from baffle.app.downlink import Downlink
from baffle.core.messages import Group, Outcome, RoundRequest
from baffle.core.ports import CONTRIBUTED, MISSING, Aggregation, Collected, Transport
from baffle.core.ring import Sum
from baffle.core.seeds import permutation
from baffle.core.state import apply
from baffle.journal.replay import Present
from baffle.journal.store import Journal
from baffle.trajectory import Trajectory


@dataclass(frozen=True)
class Played:
    """A round that is over: the present after it, and what is worth telling."""

    present: Present
    metrics: Mapping[str, Any]
    participation: Mapping[int, str]


def play_round(
    course: Trajectory,
    present: Present,
    transport: Transport,
    aggregation: Aggregation,
    journal: Journal,
    downlink: Downlink,
) -> Played:
    """From the present to the next one. `apply` is pure: the journal holds the round before anybody builds on it."""
    roster = choose_clients(course, present.round)
    requests = open_round(course, present, roster, downlink)
    collected = aggregation.collect(requests, transport)
    outcome = outcome_of(course, requests[roster[0]], collected.sum)
    state = apply(course.rule, present.state, outcome)
    metrics = tell(collected, downlink.newcomers(roster))
    downlink.delivered([client for client, event in collected.events.items() if event == CONTRIBUTED], present)
    snapshot = (present.round + 1) % course.plan.run.snapshot_every == 0
    chain = journal.append(
        present.chain, outcome, state, snapshot=snapshot, metrics=metrics, participation=collected.events
    )
    return Played(Present(present.round + 1, state, chain), metrics, collected.events)


def choose_clients(course: Trajectory, round_number: int) -> list[int]:
    """Who takes part: the same for everybody who knows the plan."""
    everyone = course.plan.federation.clients
    if course.plan.per_round == everyone:
        return list(range(everyone))
    order = permutation(course.seeds.key("participation", round_number), everyone)
    return sorted(order[: course.plan.per_round].tolist())


def open_round(course: Trajectory, present: Present, roster: list[int], downlink: Downlink) -> dict[int, RoundRequest]:
    """For each client the round's request, with what that client has missed. Who missed the same shares one."""
    weights_hash = present.state.weights_hash()
    catch_ups = downlink.catch_ups(roster, present)
    made = {
        id(catch_up): RoundRequest(present.round, present.round, course.digest, weights_hash, catch_up)
        for catch_up in catch_ups.values()
    }
    return {client: made[id(catch_ups[client])] for client in roster}


def outcome_of(course: Trajectory, request: RoundRequest, total: Sum | None) -> Outcome:
    """What the journal keeps of a round. Without a sum the round is skipped, and the run goes on."""
    if total is None:
        return Outcome(request.round, "skipped", ())
    totals = total.totals.astype(np.dtype("<i4")).tobytes()
    return Outcome(request.round, course.plan.outcome_kind, (Group(request.key, totals, total.weight),))


def tell(collected: Collected, joined: Set[int]) -> dict[str, Any]:
    """A round in numbers. What a client needs once, to join, is counted apart from what it needs every round."""
    total, down = collected.sum, collected.downlink
    return {
        "loss": total.loss if total else None,
        "contributors": total.contributors if total else 0,
        "clipped": total.clipped if total else 0,
        "uplink_bytes": sum(collected.uplink.values()),
        "replies": sum(event != MISSING for event in collected.events.values()),
        "downlink_bytes": sum(size for client, size in down.items() if client not in joined),
        "requests": len(collected.events.keys() - joined),
        "join_bytes": sum(size for client, size in down.items() if client in joined),
        "joins": len(joined),
    }
