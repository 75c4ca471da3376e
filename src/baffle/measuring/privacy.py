"""Private plans: a clipping norm from simulated clients, the ε of a run, and how much noise a value has."""

import math
from dataclasses import dataclass

import msgspec
import numpy as np

from baffle.core.arrays import F64, rms
from baffle.errors import PlanError
from baffle.federation import workers_of
from baffle.plan import Plan, PrivacySettings
from baffle.plan.privacy import head_factor
from baffle.task.load import Runtimes, Task
from baffle.task.server_task import with_settings
from baffle.trajectory import trajectory_of

MOST_CLIENTS = 32  # how many clients' vectors are measured at most
LOOSE = 3.0  # a clipping norm above this many times the median length of a vector is called loose: noise grows with it
WASTEFUL = 1.5  # a floor is called low if a sum over all clients has this many times the noise that it needs


@dataclass(frozen=True)
class Privacy:
    """What a private run promises, and what that costs. Values are those of the mean over the clients of a sum."""

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
    """The task of a private plan with a clipping norm, and the reason for it, which is empty if the plan has a norm or
    needs none. The norm is the median length of simulated clients' vectors. In a real run nobody may look at these."""
    plan = task.plan
    if not plan.privacy.on or plan.privacy.clip:
        return task, ""
    lengths = np.linalg.norm(vectors_of(task), axis=1)
    clip = float(f"{np.median(lengths):.2g}")
    if not (clip > 0 and math.isfinite(clip)):
        raise PlanError("privacy.clip cannot be proposed: simulated clients' vectors are zero or not finite; set one")
    why = (
        f"privacy.clip = {clip:g} is proposed: the median length of the vectors of {len(lengths)} simulated clients at "
        "the initial weights. Take it from public or simulated data: a real run must not look at its clients' vectors"
    )
    return task.with_noise_of(with_settings(plan, privacy={"clip": clip})), why


def vectors_of(task: Task) -> F64:
    """What some clients would send at the initial weights without clipping and noise, a row each. All steps of a round
    are taken to be alike."""
    plan = msgspec.structs.replace(task.plan, privacy=PrivacySettings())
    weights = task.initial_weights()
    trajectory = trajectory_of(plan, len(weights))
    workers = workers_of(task, trajectory, Runtimes(task, 1).borrow)[:MOST_CLIENTS]
    vectors = [trajectory.ring.decode(worker.vector(0, weights), 1) for worker in workers]
    factor = head_factor(task.plan, trajectory.n)
    means = [trajectory.means(trajectory.of_step(vector.totals, 0), vector.weight) for vector in vectors]
    steps = np.stack([np.concatenate([scalars, factor * head]) for scalars, head in means])
    return np.tile(steps, plan.federation.local_steps)


def measure_privacy(task: Task) -> Privacy | None:
    """What a private plan promises and what that costs; None for a plan that is not private."""
    plan = task.plan
    trajectory = trajectory_of(plan, len(task.initial_weights()))
    private, epsilon = trajectory.private, trajectory.epsilon(plan.rounds)
    if private is None or epsilon is None:
        return None
    vectors = vectors_of(task)
    lengths = np.linalg.norm(vectors, axis=1)
    clipped = vectors * np.minimum(1, private.norm / np.maximum(lengths, 1e-300))[:, None]
    clients = plan.group_sizes[0]
    noise_on_value = math.sqrt(clients * float(private.share)) / (clients * private.scale)
    given = (epsilon, plan.privacy.delta, plan.rounds, private.noise, private.norm, private.sharers)
    return Privacy(*given, float(np.median(lengths)), rms(clipped.mean(axis=0)), noise_on_value)


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
