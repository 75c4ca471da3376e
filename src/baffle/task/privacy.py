"""What [privacy] means for a task: a clipping norm from simulated clients, and how much noise a value will carry."""

import math
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from baffle.client.worker import Worker
from baffle.core.arrays import F64
from baffle.errors import PlanError
from baffle.plan import Plan, PrivacySettings
from baffle.task.load import Runtimes, Task
from baffle.trajectory import trajectory_of

MOST_CLIENTS = 32
"""How many clients' vectors are measured at most."""

LOOSE = 3.0
"""A clipping norm is called loose from this many times the median length of a vector on: noise grows with it."""

WASTEFUL = 1.5
"""A floor is called low if a sum over everybody has this many times the noise that it needs."""


@dataclass(frozen=True)
class Privacy:
    """What a private run promises, and what it pays: values are those of the mean over the clients of a sum."""

    epsilon: float  # at delta, over all planned rounds
    delta: float
    rounds: int
    noise: float  # the noise's standard deviation in a sum, as a multiple of the clipping norm
    clip: float
    sharers: int
    length: float  # the median length of a client's vector at the initial weights, on the plan's own data
    value: float  # the root mean square of a value, of the clients that were measured
    noise_on_value: float  # the standard deviation of the noise on it, if nobody drops out


def with_clip(task: Task) -> tuple[Task, str]:
    """The task of a private plan with a clipping norm, and why it is that one; empty if the plan has one or needs none.
    It is the median length of simulated clients' vectors. In a real run nobody may look at these."""
    plan = task.plan
    if not plan.privacy.on or plan.privacy.clip:
        return task, ""
    lengths = np.linalg.norm(vectors_of(task), axis=1)
    clip = float(f"{np.median(lengths):.2g}")
    if not (clip > 0 and math.isfinite(clip)):
        raise PlanError("privacy.clip cannot be proposed: simulated clients' vectors are zero or not finite; set one")
    settled = msgspec.structs.replace(plan, privacy=msgspec.structs.replace(plan.privacy, clip=clip))
    why = (
        f"privacy.clip = {clip:g} is proposed: the median length of the vectors of {len(lengths)} simulated clients at "
        "the initial weights. Take it from public or simulated data: a real run must not look at its clients' vectors"
    )
    return replace(task, server=task.server.with_noise_of(settled)), why


def vectors_of(task: Task) -> F64:
    """What some clients would send at the initial weights without clipping and noise, a row each."""
    plan = msgspec.structs.replace(task.plan, privacy=PrivacySettings())
    weights = task.initial_weights()
    trajectory = trajectory_of(plan, len(weights))
    runtimes = Runtimes(task, 1)
    rows = []
    for number, (k, share) in enumerate(list(zip(task.tiers, task.shares, strict=True))[:MOST_CLIENTS]):
        worker = Worker(number, k, trajectory, task.source.train, share, runtimes.borrow)
        vector = trajectory.ring.decode(worker.vector(0, weights), 1)
        rows.append(vector.totals / (trajectory.ring.scale * vector.weight))
    return np.stack(rows)


def measure_privacy(task: Task) -> Privacy | None:
    """What a private plan promises and pays; None for a plan that is not private."""
    plan = task.plan
    trajectory = trajectory_of(plan, len(task.initial_weights()))
    private, epsilon = trajectory.private, trajectory.epsilon(plan.rounds)
    if private is None or epsilon is None:
        return None
    vectors = vectors_of(task)
    lengths = np.linalg.norm(vectors, axis=1)
    clipped = vectors * np.minimum(1, private.norm / np.maximum(lengths, 1e-300))[:, None]
    clients = plan.group_sizes[0]
    return Privacy(
        epsilon,
        plan.privacy.delta,
        plan.rounds,
        private.noise,
        private.norm,
        private.sharers,
        float(np.median(lengths)),
        float(np.sqrt(np.mean(clipped.mean(axis=0) ** 2))),
        math.sqrt(clients * float(private.share)) / (clients * private.scale),
    )


def judge_privacy(plan: Plan, privacy: Privacy) -> list[str]:
    """Advice on a private plan."""
    advice, clients = [], plan.group_sizes[0]
    if privacy.clip > LOOSE * privacy.length:
        advice.append(
            f"privacy.clip = {privacy.clip:g} is loose: simulated clients' vectors are about {privacy.length:.2g} long "
            "at the initial weights, and noise grows with the norm"
        )
    if clients > WASTEFUL * privacy.sharers:
        advice.append(
            f"secure.floor = {plan.secure.floor}: only {privacy.sharers} of {clients} clients are counted on for "
            f"noise, so a sum over all has {clients / privacy.sharers:.2g} times the variance that ε needs; a higher "
            "floor means less noise, and that rounds are skipped sooner when clients drop out"
        )
    if privacy.noise_on_value > privacy.value:
        advice.append(
            f"noise outweighs what a round measures: {privacy.noise_on_value:.2g} on values of about "
            f"{privacy.value:.2g}; more clients, a larger ε or a smaller model give it less weight"
        )
    return advice
