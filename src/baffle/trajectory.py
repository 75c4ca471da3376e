"""From a plan to the values that core computes with. Client, server and auditor must agree on them."""

import os
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

from baffle.core import law
from baffle.core.arrays import F32, F64, I32
from baffle.core.directions import (
    NUMBERS_AT_ONCE,
    OUTER,
    Directions,
    Support,
    dense,
    layout_of,
    support_of,
    supports,
)
from baffle.core.head import without
from baffle.core.messages import Outcome
from baffle.core.outer import places, size_of
from baffle.core.rebuild import gradient_from_scalars, gradient_from_vector, require_whole_tensors
from baffle.core.ring import Encoding, Ring, Totals, combine_gradients, combine_totals
from baffle.core.seeds import Seeds
from baffle.core.state import Rule
from baffle.core.update import (
    Transform,
    adam_by_layers,
    average,
    clip,
    compose,
    no_average,
    sgd,
    weight_decay,
)
from baffle.errors import MessageError, PlanError
from baffle.plan import Plan, UpdateSettings
from baffle.plan.arithmetic import distribution, optimizer_of, share_of
from baffle.plan.privacy import length_of, private_ring
from baffle.privacy.accounting import spent
from baffle.privacy.ring import PrivateRing

REBUILDERS = 256  # the most threads that rebuild a gradient. A plan in a journal could ask for any number.
LARGEST_EXPONENT = 200
"""The ring's scale lies between 2 to this power and its inverse. Beyond it, scalars are not float32 numbers."""


class Epoch(NamedTuple):
    """A stretch of a networked run under one statement."""

    first: int  # the round that it begins with
    salt: bytes  # of its keys
    run: bytes = b""  # the hash of its statement
    before: bytes | None = None  # the hash of the chain before it, if that is known


@dataclass(frozen=True)
class Trajectory:
    """A plan applied to a model of n weights: seeds, supports, ring and update rule."""

    plan: Plan
    n: int
    length: int  # values in a contribution: a scalar per step and direction, or a number per weight
    digest: bytes
    epochs: tuple[Epoch, ...]  # of a networked run; a simulation has none
    supports: tuple[Support, ...]  # of the directions of a step
    ring: Encoding
    rule: Rule
    block: int  # how many numbers of directions are drawn at a time; no bit depends on it
    threads: int  # how many threads to use; no bit depends on it

    def weight_of(self, samples: int) -> int:
        """N_c: the weight of a client with this many samples."""
        return 1 if self.plan.federation.weighting == "uniform" else min(samples, self.plan.ring.n_max)

    def key_number(self, round_number: int, group: int) -> int:
        """The number of the key for a round's directions, or for one group's if every group has its own."""
        return round_number * self.plan.secure.groups + group if self.plan.own_seeds else round_number

    @property
    def private(self) -> PrivateRing | None:
        """The ring, which also knows how much noise a client adds, if the run is private."""
        return self.ring if isinstance(self.ring, PrivateRing) else None

    def epsilon(self, rounds: int) -> float | None:
        """ε, at the plan's δ, of a client that takes part in so many rounds; None if the run is not private."""
        if self.private is None:
            return None
        return spent([replace(self.private.release, count=rounds)], self.plan.privacy.delta)

    def seeds(self, round_number: int) -> Seeds:
        """The root of a round's keys, with the salt of the newest epoch that has begun by then."""
        salts = (epoch.salt for epoch in reversed(self.epochs) if epoch.first <= round_number)
        return Seeds(self.plan.seed, self.digest, next(salts, b""))

    def steps_in(self, round_number: int) -> int:
        """How many steps a round has."""
        federation = self.plan.federation
        return 1 if round_number < federation.warm_up else federation.local_steps

    def steps_before(self, round_number: int) -> int:
        """How many steps the rounds before a round have, those that are skipped included."""
        return self.plan.steps_before(round_number)

    def of_step(self, totals: I32, step: int) -> I32:
        """One step's share of the totals of a round."""
        own: I32 = totals.reshape(self.plan.federation.local_steps, -1)[step]
        return own

    def directions(self, key_number: int, step: int = 0) -> Directions:
        """The directions of a step of a round, by the number of its key."""
        number, group = divmod(key_number, self.plan.secure.groups) if self.plan.own_seeds else (key_number, 0)
        numbers = (number, group, step) if step else (number, group)
        return Directions(self.seeds(number).key("directions", *numbers), distribution(self.plan.probe))

    def means(self, totals: I32, weight: int) -> tuple[F64, F64]:
        """The mean scalars of a step's sum of scalars, and the mean gradient of an exact head."""
        k = len(self.supports)
        return totals[:k] / (self.ring.scale * weight), totals[k:] / (self.ring.head_scale * weight)

    def drawn(self, gradient: F32, directions: Directions) -> F32:
        """An estimate of a gradient, drawn from the law that this key's directions have. An exact head stays exact."""
        estimate, head = law.draw(gradient, directions, self.supports, block=self.block), head_of(self.plan)
        for weights, _ in head.parts() if head else []:
            estimate[weights] = gradient[weights]
        return estimate

    def estimate(self, totals: Totals, key_number: int, step: int = 0, threads: int = 1) -> F32:
        """The gradient of a step from its totals: those of a sum, or of the vector of one client."""
        drawn, supports, head = self.directions(key_number, step), self.supports, head_of(self.plan)
        (scalars, weight), (_, exact) = totals, self.means(*totals)
        whole = gradient_from_scalars(
            scalars[: len(supports)], weight, drawn, supports, self.n, self.ring, block=self.block, threads=threads
        )
        for weights, numbers in head.parts() if head else []:
            whole[weights] = exact[numbers]
        return whole

    def with_epochs(self, epochs: tuple[Epoch, ...]) -> "Trajectory":
        """The same trajectory under the salts of a network's epochs."""
        return self if epochs == self.epochs else trajectory_of(self.plan, self.n, self.block, epochs)


def trajectory_of(plan: Plan, n: int, block: int = NUMBERS_AT_ONCE, epochs: tuple[Epoch, ...] = ()) -> Trajectory:
    """Apply a resolved plan to a model of n weights. A gradient is rebuilt from `block` numbers at a time; a smaller
    block takes less memory."""
    touched = _supports(plan, n)
    _require_layers(plan.update, n)
    _require_shapes(plan, n, touched)
    ring, length, digest = _ring(plan, n), length_of(plan, n), plan.trajectory_digest()
    threads = plan.run.workers or os.cpu_count() or 1
    rebuilders = min(threads, REBUILDERS)

    def gradient(outcome: Outcome, step: int = 0) -> F32:
        groups = checked_groups(outcome, plan, length)
        how = plan.secure.combine
        if not plan.own_seeds:
            groups = [(groups[0][0], combine_totals([totals for _, totals in groups], how))]
        gradients = [_gradient(key, totals, step) for key, totals in groups]
        return combine_gradients(gradients, [totals.weight for _, totals in groups], how)

    def _gradient(key_number: int, totals: Totals, step: int) -> F32:
        if plan.outcome_kind == "vector":
            mean = gradient_from_vector(totals.numbers, totals.weight, ring)
            return trajectory.drawn(mean, trajectory.directions(key_number)) if plan.draws_for_all else mean
        own = totals._replace(numbers=trajectory.of_step(totals.numbers, step))
        return trajectory.estimate(own, key_number, step, rebuilders)

    # At epoch level the clients have already taken their steps. They send minus their weight change, and one plain
    # step of rate 1 along its mean is federated averaging.
    smooth = average(plan.update.ema) if plan.update.ema else no_average()
    rule = Rule(gradient, sgd(1.0), smooth, lambda round_number: trajectory.steps_in(round_number))
    if plan.federation.level == "batch":
        rule = replace(rule, optimizer=optimizer(plan.update), share=share_of(plan.update))
    trajectory = Trajectory(plan, n, length, digest, epochs, touched, ring, rule, block, threads)
    return trajectory


def _supports(plan: Plan, n: int) -> tuple[Support, ...]:
    """The support of each direction."""
    if plan.estimator == "backprop":
        return dense(n, plan.probe.k)
    head = head_of(plan)
    if plan.probe.head == "exact" and (head is None or max(head.stop, head.tail[1]) > n):
        raise PlanError(
            f"probe.head_at is not a part of the model's {n} weights: expected the place that a run writes into its "
            "own plan.toml when it starts; leave it out to have it found"
        )
    if head and head.size == n:
        return ()
    if plan.probe.supports == "dense":
        rest = besides(Support(0, n), head)
        return (rest,) * plan.probe.k if rest else ()
    if plan.probe.supports == "auto":
        raise PlanError('probe.supports is "auto": expected what a run writes into its own plan.toml when it starts')
    if not plan.probe.layout:
        raise PlanError(
            "probe.layout is empty: expected the one that a run writes into its own plan.toml when it starts"
        )
    layout = layout_of(plan.probe.layout)
    if head and any(besides(entry.support, head) != entry.support for entry in layout):
        raise PlanError("probe.layout has weights of the exact head; leave it out to have one made")
    if max(max(entry.support.stop, entry.support.tail[1]) for entry in layout) > n:
        raise PlanError(f"probe.layout reaches beyond the model's {n} weights; leave it out to have one made")
    return supports(layout)


def head_of(plan: Plan) -> Support | None:
    """Where the weights lie whose gradient is exact, if a plan has such and knows it."""
    return support_of(plan.probe.head_at) if plan.head_size else None


def besides(support: Support, head: Support | None) -> Support | None:
    """The weights of a support besides an exact head's."""
    try:
        return without(support, head) if head else support
    except ValueError as fault:
        raise PlanError(f'probe.head: {fault}, which dense directions cannot; set probe.supports = "layers"') from None


def _require_layers(update: UpdateSettings, n: int) -> None:
    """Refuse layers that do not hold each of the model's n weights once."""
    if update.moments == "weights":
        return
    slices = sorted((part.start, part.stop) for row in update.layers for part, _ in support_of(row).parts())
    edges = [0, *(edge for ends in slices for edge in ends), n]
    if any(left != right for left, right in zip(edges[0::2], edges[1::2], strict=True)):
        raise PlanError(
            f"update.layers do not hold each of the model's {n} weights once: expected those that a run writes into "
            "its own plan.toml when it starts; leave them out to have them made"
        )


def _require_shapes(plan: Plan, n: int, touched: tuple[Support, ...]) -> None:
    """Refuse shapes of tensors that are not those of a model of n weights, and supports that cut a tensor."""
    probe = plan.probe
    if probe.distribution != OUTER or plan.estimator == "backprop":
        return
    if size_of(probe.shapes) != n:
        raise PlanError(
            f"probe.shapes are not those of the model's {n} weights: expected those that a run writes into its own "
            "plan.toml when it starts; leave them out to have them made"
        )
    try:
        require_whole_tensors(places(probe.shapes), touched)
    except ValueError as fault:
        raise PlanError(f"probe.layout: {fault}; leave it out to have one made") from None


def checked_groups(outcome: Outcome, plan: Plan, length: int) -> list[tuple[int, Totals]]:
    """The groups' totals, each with the number of its key; an outcome that does not fit the plan is refused."""
    most = plan.secure.groups
    if outcome.kind != plan.outcome_kind or not 1 <= len(outcome.groups) <= most:
        raise MessageError(
            f"round {outcome.round} has {len(outcome.groups)} groups of kind {outcome.kind}, expected 1 to {most} of "
            f"{plan.outcome_kind}"
        )
    keys = [group.key for group in outcome.groups]
    if len(set(keys)) != (len(keys) if plan.own_seeds else 1):
        raise MessageError(f"round {outcome.round} has groups with the keys {keys}")
    for group in outcome.groups:
        if group.weight < 1 or group.key < 0 or len(group.totals) != 4 * length:
            raise MessageError(
                f"round {outcome.round} holds {len(group.totals)} bytes of totals with key {group.key} and weight "
                f"{group.weight}, expected {4 * length} bytes, a key number and a positive weight"
            )
    return [(group.key, Totals(group.numbers(), group.weight)) for group in outcome.groups]


def optimizer(settings: UpdateSettings) -> Transform:
    """The optimizer that the plan's [update] describes."""
    if settings.moments == "layers":
        step = adam_by_layers([support_of(row) for row in settings.layers], settings.rate, *settings.betas)
    else:
        step = optimizer_of(settings)
    before = [clip(settings.clip)] if settings.clip else []
    before += [weight_decay(settings.weight_decay)] if settings.weight_decay else []
    return compose(*before, step)


def _ring(plan: Plan, n: int) -> Encoding:
    if not plan.ring.n_max:
        raise PlanError("ring.n_max is 0: expected the number that a run writes into its own plan.toml when it starts")
    if plan.privacy.on:
        private = private_ring(plan, n)
        _require_usual_scale(private.exponent, f"a bound of {private.norm:g} leads", "set privacy.clip nearer to 1")
        return private
    ring, remedy = _public_ring(plan), "leave ring.d_max, ring.update_max and ring.n_max out"
    for used in (ring, Ring(1, 1, plan.ring.d_max)):  # a client that estimates a gradient has a ring of its own
        _require_usual_scale(used.exponent, f"bounds of {used.clip:g} and {used.n_max} samples lead", remedy)
    return ring


def _require_usual_scale(exponent: int, bounds: str, remedy: str) -> None:
    if abs(exponent) > LARGEST_EXPONENT:
        raise PlanError(f"ring: {bounds} to a scale of 2^{exponent}, expected at most 2^±{LARGEST_EXPONENT}; {remedy}")


def _public_ring(plan: Plan) -> Ring:
    # Journals of version 2 may hold runs against a lying server in which clients count by their samples.
    silent = plan.secure.mode == "malicious-server" and plan.federation.weighting == "uniform"
    n_max, bound, tier_factor = plan.ring.n_max, plan.ring.d_max, Fraction(1)
    head, steps = (0, 1.0), plan.federation.local_steps
    if plan.outcome_kind == "scalars":
        smallest = min((tier.k for tier in plan.federation.tiers), default=plan.probe.k)
        tier_factor = Fraction(plan.probe.k, smallest)
        head = (plan.head_size, plan.ring.head_max) if plan.head_size else head
    elif plan.federation.seeds != "own":
        # An entry of an estimate is a mean of scalars times numbers of about 1, so with own seeds d_max serves too.
        bound = plan.ring.update_max
    return Ring(plan.per_round, n_max, bound, tier_factor, silent, *head, steps)
