"""One round, top to bottom: open, exchange, close, apply, append. Start reading here."""

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from baffle.app.downlink import Downlink
from baffle.core.messages import Group, Outcome, RoundRequest, encode
from baffle.core.ports import Aggregation, Closed, Transport
from baffle.core.seeds import permutation
from baffle.core.state import apply
from baffle.journal.replay import Present
from baffle.journal.store import CONTRIBUTED, Journal
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
    request, messages = open_round(course, present, roster, downlink)
    replies = transport.exchange(messages)
    closed = aggregation.close(request, replies)
    outcome = outcome_of(course, request, closed)
    state = apply(course.rule, present.state, outcome)
    metrics = tell(closed, messages, replies, downlink.newcomers(roster))
    downlink.delivered([client for client in replies if client not in closed.refusals], present)
    participation = {client: _event(client, replies, closed) for client in roster}
    snapshot = (present.round + 1) % course.plan.run.snapshot_every == 0
    chain = journal.append(
        present.chain, outcome, state, snapshot=snapshot, metrics=metrics, participation=participation
    )
    return Played(Present(present.round + 1, state, chain), metrics, participation)


def choose_clients(course: Trajectory, round_number: int) -> list[int]:
    """Who takes part: the same for everybody who knows the plan."""
    everyone = course.plan.federation.clients
    if course.plan.per_round == everyone:
        return list(range(everyone))
    order = permutation(course.seeds.key("participation", round_number), everyone)
    return sorted(order[: course.plan.per_round].tolist())


def open_round(
    course: Trajectory, present: Present, roster: list[int], downlink: Downlink
) -> tuple[RoundRequest, dict[int, bytes]]:
    """The round's request, and for each client the message with what that client has missed."""
    catch_ups = downlink.catch_ups(roster, present)
    weights_hash = present.state.weights_hash()
    requests = {
        id(catch_up): RoundRequest(present.round, present.round, course.digest, weights_hash, catch_up)
        for catch_up in catch_ups.values()
    }
    encoded = {made: encode(request) for made, request in requests.items()}
    return next(iter(requests.values())), {client: encoded[id(catch_ups[client])] for client in roster}


def outcome_of(course: Trajectory, request: RoundRequest, closed: Closed) -> Outcome:
    """What the journal keeps of a round. Without a sum the round is skipped, and the run goes on."""
    if closed.sum is None:
        return Outcome(request.round, "skipped", ())
    totals = closed.sum.totals.astype(np.dtype("<i4")).tobytes()
    return Outcome(request.round, course.plan.outcome_kind, (Group(request.key, totals, closed.sum.weight),))


def tell(
    closed: Closed, messages: Mapping[int, bytes], replies: Mapping[int, bytes], joined: Set[int]
) -> dict[str, Any]:
    """A round in numbers. What a client needs once, to join, is counted apart from what it needs every round."""
    total = closed.sum
    return {
        "loss": total.loss if total else None,
        "contributors": total.contributors if total else 0,
        "clipped": total.clipped if total else 0,
        "uplink_bytes": sum(len(reply) for reply in replies.values()),
        "replies": len(replies),
        "downlink_bytes": sum(len(message) for client, message in messages.items() if client not in joined),
        "requests": len(messages.keys() - joined),
        "join_bytes": sum(len(messages[client]) for client in joined),
        "joins": len(joined),
    }


def _event(client: int, replies: Mapping[int, bytes], closed: Closed) -> str:
    if client not in replies:
        return "missing"
    return closed.refusals.get(client, CONTRIBUTED)
