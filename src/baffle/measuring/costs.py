"""Predicts what a run will cost before it starts: bytes, forward passes, memory, alignment, and advice."""

import math
from collections import Counter
from dataclasses import dataclass

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
from baffle.core.arrays import F32
from baffle.core.messages import CatchUp, Group, Outcome, RoundRequest, encode
from baffle.core.state import pack
from baffle.measuring.precision import Contrast, Precision, judge, judge_contrast, measure, measure_contrast
from baffle.measuring.privacy import Privacy, judge_privacy, measure_privacy
from baffle.plan import Plan
from baffle.task.load import Task
from baffle.task.memory import RESERVE
from baffle.trajectory import Trajectory, trajectory_of


@dataclass(frozen=True)
class Costs:
    """Costs of one client in one round, unless a field says otherwise."""

    scalars: str | None  # "probed", or "drawn" from their law; None for backpropagation
    n_weights: int
    clients_per_round: int
    clients_per_sum: int  # the fewest clients that are summed together, so each hides among at least this many
    samples_per_client: int
    forwards: int
    supports: str  # of "stages" and "units", a forward pass runs only a part of the model
    forwards_in_all: int  # of all clients in all rounds
    uplink_bytes: int
    downlink_bytes: int
    secure_bytes: int  # the secure sum's share of uplink and downlink
    join_bytes: int
    weights_bytes: int
    memory_bytes: int | None  # None if the runtime cannot tell
    alignment: float | None  # expected cosine of estimate and gradient; None for backpropagation
    precision: Precision | None  # None for backpropagation
    privacy: Privacy | None  # None if the run is not private
    contrast: Contrast | None  # None for a single layer, or for backpropagation
    advice: list[str]


def costs(task: Task) -> Costs:
    plan, initial, probing = task.plan, task.initial_weights(), task.draws_directions
    trajectory = trajectory_of(plan, len(initial))
    forwards = [forwards_of(trajectory, k, len(share)) for k, share in zip(task.tiers, task.shares, strict=True)]
    up, down = _secure_bytes(plan)
    precision = measure(task) if probing else None
    contrast, privacy = measure_contrast(task), measure_privacy(task)
    return Costs(
        scalars=plan.scalars,
        n_weights=trajectory.n,
        clients_per_round=plan.per_round,
        clients_per_sum=plan.group_sizes[0],
        samples_per_client=int(np.median([len(share) for share in task.shares])),
        forwards=max(forwards),
        supports=plan.probe.supports,
        forwards_in_all=round(plan.rounds * plan.per_round * float(np.mean(forwards))),
        uplink_bytes=contribution_bytes(trajectory) + up,
        downlink_bytes=_downlink_bytes(trajectory) + down,
        secure_bytes=up + down,
        join_bytes=_join_bytes(trajectory, initial),
        weights_bytes=4 * trajectory.n,
        memory_bytes=_memory(task, trajectory),
        alignment=expected_alignment(trajectory) if probing or plan.scalars == "drawn" else None,
        precision=precision,
        privacy=privacy,
        contrast=contrast,
        advice=[
            *(judge(task, precision) if precision else []),
            *(judge_privacy(plan, privacy) if privacy else []),
            *(judge_contrast(task, contrast) if contrast else []),
            *_on_merged_layers(task),
            *task.remarks,
        ],
    )


def _on_merged_layers(task: Task) -> list[str]:
    probe = task.plan.probe
    layers = task.model.layers() or () if probe.supports == "layers" else ()
    if len(probe.layout) >= len(layers):
        return []
    return [
        f"probe.k = {probe.k} directions are fewer than the model's {len(layers)} layers: neighbouring small layers "
        f"share directions, {len(probe.layout)} parts in all; set probe.k to at least {len(layers)} to keep them apart"
    ]


def expected_alignment(trajectory: Trajectory) -> float:
    """The expected cosine of estimate and gradient: 1/√(1 + Σ_s n_s(n_s + 1)/(n·K_s)) over supports of n_s weights with
    K_s directions, if the gradient is spread evenly over the weights. For dense directions this is the paper's
    √(K/(K+n+1)). If each group or client has its own directions, K is multiplied by their number."""
    plan = trajectory.plan
    per_direction = plan.per_round if plan.federation.seeds == "own" else plan.secure.groups if plan.own_seeds else 1
    shares = Counter(trajectory.supports)
    spread = sum(support.size * (support.size + 1) / count for support, count in shares.items())
    return 1 / math.sqrt(1 + spread / (trajectory.n * per_direction))


def _join_bytes(trajectory: Trajectory, initial: F32) -> int:
    """What a client that comes later receives once: the state, the hash before the last round, and its outcome."""
    outcome = Outcome(0, "scalars", (Group(0, bytes(4 * trajectory.length), 0),))
    items = (pack(trajectory.rule.start(initial)), bytes(32), encode(outcome))
    return _request_bytes(CatchUp("snapshot", 0, items))


def _downlink_bytes(trajectory: Trajectory) -> int:
    """The size of a request to a client that took part in the round before."""
    plan = trajectory.plan
    if plan.run.downlink != "scalars":
        return _request_bytes(CatchUp(plan.run.downlink, 0, (bytes(4 * trajectory.n),)))
    outcome = Outcome(0, plan.outcome_kind, (Group(0, bytes(4 * trajectory.length), 1),) * plan.secure.groups)
    return _request_bytes(CatchUp("outcomes", 0, (encode(outcome),)))


def _secure_bytes(plan: Plan) -> tuple[int, int]:
    """The bytes that a secure sum adds to one client's round, up and down, in steady state and without dropouts. The
    cost of a new list of keys is spread over the rounds that it serves."""
    if plan.secure.mode == "off":
        return 0, 0
    members = tuple(range(plan.group_sizes[1]))
    agreement = plan.secure.mode == "malicious-server"
    k = ClientPolicy(agreement=agreement).graph(members, 0).k
    keys = Advertisement(0, bytes(16), bytes(32), 0, (bytes(32),) * KEYS_AT_ONCE, bytes(64))
    sealed = Sealed(0, bytes(BOX_BYTES * k), bytes(32))
    turned = Turned(Unmasked(0, bytes(SHARE_BYTES * k), bytes(SHARE_BYTES)), sealed)
    signers, signatures = (members, bytes(SIGNATURE_BYTES * len(members))) if agreement else ((), b"")
    turn = Turn(Unmask(0, members, (), signers, signatures), Opening(0, members, 1, 1, ()))
    request = RoundRequest(0, bytes(32), bytes(32), bytes(32), CatchUp("weights", 0, ()))
    wrapped = len(encode(MaskedRequest(request, members, bytes(32), bytes(BOX_BYTES * k)))) - len(encode(request))
    agree, agreed = (Agree(0, members, ()), Agreed(0, bytes(64), bytes(64))) if agreement else (None, None)
    served = KEYS_AT_ONCE * plan.federation.participation  # rounds that a client takes part in with one list of keys
    others = plan.federation.clients - 1
    met = others * (1 - (1 - k / others) ** served) if k < others else k  # different neighbours, as expected
    received = (len(encode(Hello(0))) + (len(encode(keys)) + 5) * met) / served
    up = len(encode(turned)) + len(encode(keys)) / served + (len(encode(agreed)) if agreed else 0)
    return round(up), round(wrapped + len(encode(turn)) + received + (len(encode(agree)) if agree else 0))


def _request_bytes(catch_up: CatchUp) -> int:
    return len(encode(RoundRequest(0, bytes(32), bytes(32), bytes(32), catch_up)))


def _memory(task: Task, trajectory: Trajectory) -> int | None:
    """Bytes of the arrays that a client holds at once: weights, directions, activations, but not the runtime's code.

    Weights are held twice: in the replica, and in the runtime, where a probe moves them. A client that replays rounds
    also keeps the optimizer's state. A whole forward pass has an upper bound. If only parts of the model are run, the
    activations of a micro-batch are kept, as in backpropagation. None if the runtime cannot tell how much it takes.
    """
    plan, n = task.plan, trajectory.n
    replica = trajectory.rule.start(np.zeros(n, np.float32)).vectors() if plan.run.downlink == "scalars" else ()
    copies = 4 * n * 2 + sum(vector.nbytes for vector in replica)
    count = min(plan.probe.micro_batch, len(task.source.train))
    if plan.estimator == "probe" and task.runs_whole():
        known = task.model.pass_bytes(plan.probe, task.source.example(1)) is not None
        return copies + task.footprint().bytes(count) if known else None
    activations = task.model.activation_bytes(task.source.train.batch(np.arange(count)))
    return None if activations is None else copies + RESERVE + 4 * n + activations
