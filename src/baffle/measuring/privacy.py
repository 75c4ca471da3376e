"""Private plans: a clipping norm from simulated clients, the ε of a run, and how much noise a value has."""

import math
from dataclasses import dataclass

import msgspec
import numpy as np

from baffle.core.arrays import F64, rms
from baffle.errors import PlanError
from baffle.federation import workers_of
from baffle.plan import Plan, PrivacySettings
from baffle.plan.plan import LYING
from baffle.plan.privacy import USUAL_DELTA, USUAL_EPSILON, USUAL_FINENESS, certain_sharers, head_factor
from baffle.privacy.accounting import noise_for
from baffle.task.load import Runtimes, Task
from baffle.task.server_task import with_settings
from baffle.trajectory import trajectory_of

MOST_CLIENTS = 32  # how many clients' vectors are measured at most
LOOSE = 3.0  # a clipping norm above this many times the median length of a vector is called loose: noise grows with it
FEW = 100  # with fewer clients in a sum, noise leaves little: what it leaves is told before a run
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
    values: int  # how many values a client sends in a round: scalars, or numbers of a gradient
    worth: float  # as many values without noise tell as much, about


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
    value, length = rms(clipped.mean(axis=0)), trajectory.length
    return Privacy(
        *given, float(np.median(lengths)), value, noise_on_value, length, worth(length, value, noise_on_value)
    )


def worth(values: int, value: float, noise: float) -> float:
    """How many values without noise tell as much as so many with it, of this root mean square and this noise."""
    return values / (1 + (noise / value) ** 2) if value else 0.0


def judge_lack_of_privacy(task: Task) -> list[str]:
    """Advice on a plan for a server that may lie whose sums have no noise: what noise would cost it, from simulated
    clients."""
    plan = task.plan
    if plan.secure.mode != LYING or plan.privacy.on:
        return []
    refused = (
        f'secure.mode = "{LYING}" without [privacy]: clients refuse it, unless they pin the plan or their policies say '
        "without_privacy = true; a server that lies then gets what each sends, by subtracting sums"
    )
    vectors, clients = vectors_of(task), plan.group_sizes[0]
    values, lengths = vectors.shape[1], np.linalg.norm(vectors, axis=1)
    clip = float(np.median(lengths))
    if not (clip > 0 and math.isfinite(clip)):
        return [refused]
    clipped = vectors * np.minimum(1, clip / np.maximum(lengths, 1e-300))[:, None]
    noise = noise_for(USUAL_EPSILON, USUAL_DELTA, plan.rounds, delta_2=USUAL_FINENESS, dimension=values)
    on_value = noise * clip / math.sqrt(clients * certain_sharers(plan))
    left = worth(values, rms(clipped.mean(axis=0)), on_value)
    return [
        f"{refused}. With privacy.epsilon = {USUAL_EPSILON:g} over {plan.rounds:,} rounds a sum of {clients} clients "
        f"tells about as much as {left:.2g} of {values:,} values without noise. `baffle run` with --set privacy.epsilon"
        f"={USUAL_EPSILON:g} --set privacy.clip={clip:.2g}, on public data, shows what that costs in accuracy"
    ]


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
    if privacy.noise_on_value > privacy.value or clients < FEW:
        outweighs = "noise outweighs what a round measures" if privacy.noise_on_value > privacy.value else "few clients"
        advice.append(
            f"{outweighs}: {privacy.noise_on_value:.2g} on values of about {privacy.value:.2g}, so a sum of {clients} "
            f"clients tells about as much as {privacy.worth:.2g} of its {privacy.values:,} values without noise; more "
            "clients, a larger ε or fewer rounds give it less weight"
        )
    if plan.secure.mode == LYING and privacy.epsilon > USUAL_EPSILON:
        advice.append(
            f"ε = {privacy.epsilon:.3g} is more than the {USUAL_EPSILON:g} that clients spend in all their runs where "
            "the server may lie, unless they pin the plan or their policies say most_epsilon: they leave the run sooner"
        )
    return advice
