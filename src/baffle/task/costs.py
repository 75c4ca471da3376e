"""What a run will cost, before it starts."""

import math
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from baffle.aggregation.client.session import KEYS_AT_ONCE
from baffle.aggregation.client_policy import ClientPolicy
from baffle.aggregation.messages import (
    BOX_BYTES,
    SIGNATURE_BYTES,
    Advertisement,
    Agree,
    Agreed,
    Hello,
    MaskedRequest,
    Opening,
    Sealed,
    Turn,
    Turned,
    Unmask,
    Unmasked,
)
from baffle.aggregation.shares import SHARE_BYTES
from baffle.client.client import contribution_bytes
from baffle.client.worker import forwards_of
from baffle.core.messages import CatchUp, Group, Outcome, RoundRequest, encode
from baffle.core.state import pack
from baffle.plan import Plan
from baffle.task.load import Task
from baffle.task.memory import RESERVE
from baffle.task.precision import Precision, judge, measure
from baffle.trajectory import Trajectory, trajectory_of


@dataclass(frozen=True)
class Costs:
    """For one client and one round, unless it says otherwise."""

    n_weights: int
    clients_per_round: int
    clients_per_sum: int  # the smallest number that is summed together: nobody hides among fewer
    samples_per_client: int
    forwards: int
    supports: str  # where directions touch a part of the weights, a forward pass is only a part of one
    forwards_in_all: int
    uplink_bytes: int
    downlink_bytes: int
    secure_bytes: int  # of these two, what the secure sum adds
    join_bytes: int
    weights_bytes: int
    memory_bytes: int | None  # none if the runtime does not say
    alignment: float | None  # expected cosine of estimate and gradient; none for backpropagation
    precision: Precision | None  # none where float64 cannot be compared with
    advice: list[str]


def costs(task: Task) -> Costs:
    plan = task.plan
    initial = task.initial_weights()
    trajectory = trajectory_of(plan, len(initial))
    median = int(np.median([len(share) for share in task.shares]))
    forwards = [forwards_of(trajectory, k, len(share)) for k, share in zip(task.tiers, task.shares, strict=True)]
    secure = secure_bytes(plan)
    probing = plan.estimator == "probe"
    precision = measure(task) if probing else None
    return Costs(
        n_weights=trajectory.n,
        clients_per_round=plan.per_round,
        clients_per_sum=plan.group_sizes[0],
        samples_per_client=median,
        forwards=max(forwards),
        supports=plan.probe.supports,
        forwards_in_all=round(plan.rounds * plan.per_round * float(np.mean(forwards))),
        uplink_bytes=contribution_bytes(trajectory) + secure.up,
        downlink_bytes=downlink_bytes(trajectory) + secure.down,
        secure_bytes=secure.up + secure.down,
        join_bytes=_request_bytes(CatchUp("snapshot", 0, (pack(trajectory.rule.start(initial)),))),
        weights_bytes=4 * trajectory.n,
        memory_bytes=_memory(task, trajectory),
        alignment=_alignment(trajectory) if probing else None,
        precision=precision,
        advice=judge(task, precision) if precision else [],
    )


def _alignment(trajectory: Trajectory) -> float:
    """1/√(1 + Σ_s n_s(n_s + 1)/(n·K_s)) over supports of n_s weights with K_s directions, if the gradient is spread
    evenly over the weights. Dense directions make it the paper's √(K/(K+n+1)). Groups or clients with directions of
    their own make it as many times K."""
    plan = trajectory.plan
    per_direction = plan.per_round if plan.federation.seeds == "own" else plan.secure.groups if plan.own_seeds else 1
    shares = Counter(trajectory.supports)
    spread = sum(support.size * (support.size + 1) / count for support, count in shares.items())
    return 1 / math.sqrt(1 + spread / (trajectory.n * per_direction))


def downlink_bytes(trajectory: Trajectory) -> int:
    """The size of a request to a client that took part in the round before."""
    if trajectory.plan.run.downlink == "scalars":
        outcome = Outcome(
            0,
            trajectory.plan.outcome_kind,
            (Group(0, bytes(4 * trajectory.length), 1),) * trajectory.plan.secure.groups,
        )
        return _request_bytes(CatchUp("outcomes", 0, (encode(outcome),)))
    return _request_bytes(CatchUp(trajectory.plan.run.downlink, 0, (bytes(4 * trajectory.n),)))


class SecureBytes(NamedTuple):
    """What a secure sum adds to a round of one client, up and down."""

    up: int
    down: int


def secure_bytes(plan: Plan) -> SecureBytes:
    """In steady state and without dropouts; renewed lists of keys are spread over the slots that they serve."""
    if plan.secure.mode == "off":
        return SecureBytes(0, 0)
    members, agreement = tuple(range(plan.group_sizes[1])), plan.secure.mode == "malicious-server"
    k = ClientPolicy(agreement=agreement).graph(members, bytes(32)).k
    keys = Advertisement(0, bytes(16), bytes(32), 0, (bytes(32),) * KEYS_AT_ONCE, bytes(64))
    turned = Turned(Unmasked(0, bytes(SHARE_BYTES * k), bytes(SHARE_BYTES)), Sealed(0, bytes(BOX_BYTES * k)), "")
    signers, signatures = (members, bytes(SIGNATURE_BYTES * len(members))) if agreement else ((), b"")
    turn = Turn(Unmask(0, members, (), signers, signatures), Opening(0, members, 1, 1, bytes(32), ()))
    request = RoundRequest(0, 0, bytes(32), bytes(32), CatchUp("weights", 0, ()))
    wrapped = len(encode(MaskedRequest(request, members, bytes(32), bytes(BOX_BYTES * k)))) - len(encode(request))
    agree, agreed = (len(encode(Agree(0, members, ()))), len(encode(Agreed(0, bytes(64))))) if agreement else (0, 0)
    served = KEYS_AT_ONCE * plan.federation.participation  # rounds that a client takes part in while a list is good
    told = (len(encode(Hello(0))) + (len(encode(keys)) + 5) * _met(plan, k, served)) / served
    renewed = len(encode(keys)) / served
    return SecureBytes(round(len(encode(turned)) + renewed + agreed), round(wrapped + len(encode(turn)) + told + agree))


def _met(plan: Plan, k: int, rounds: float) -> float:
    """How many others a client is expected to have had as neighbours after so many rounds, k in each."""
    others = plan.federation.clients - 1
    return others * (1 - (1 - k / others) ** rounds) if k < others else k


def _request_bytes(catch_up: CatchUp) -> int:
    return len(encode(RoundRequest(0, 0, bytes(32), bytes(32), catch_up)))


def _memory(task: Task, trajectory: Trajectory) -> int | None:
    """Arrays that a client holds at once, without its runtime's own code: weights, directions, activations.

    Weights stand in the replica and in the runtime, where a probe moves them; a replaying client keeps the optimizer's
    state too. A whole forward pass has an upper bound. If only parts of one are run, the activations of a micro-batch
    are kept, as in a backpropagation. None if the runtime does not say how much it takes.
    """
    plan, n = task.plan, trajectory.n
    replica = trajectory.rule.start(np.zeros(n, np.float32)).vectors() if plan.run.downlink == "scalars" else ()
    copies = 4 * n * 2 + sum(vector.nbytes for vector in replica)
    count = min(plan.probe.micro_batch, len(task.source.train))
    batch = task.source.train.batch(np.arange(count))
    if plan.estimator == "probe" and task.server.runs_whole():
        known = task.model.pass_bytes(plan.probe, task.source.example(1)) is not None
        return copies + task.server.footprint().bytes(count) if known else None
    activations = task.model.activation_bytes(batch)
    return None if activations is None else copies + RESERVE + 4 * n + activations
