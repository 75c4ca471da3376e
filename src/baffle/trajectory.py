"""From a plan to the values that core works with: what client, server and auditor must agree on."""

from dataclasses import dataclass
from fractions import Fraction

from baffle.core.arrays import F32, I32
from baffle.core.directions import DISTRIBUTIONS, Directions, Support, dense
from baffle.core.messages import Group, Outcome
from baffle.core.rebuild import gradient_from_scalars, gradient_from_vector
from baffle.core.ring import Ring
from baffle.core.seeds import Seeds
from baffle.core.state import Rule
from baffle.core.update import Transform, adam, average, chain, clip, momentum, no_average, sgd, weight_decay
from baffle.errors import MessageError
from baffle.plan import Plan, Update


@dataclass(frozen=True)
class Trajectory:
    """One plan for one number of weights: its seeds, supports, ring and update rule."""

    plan: Plan
    n: int
    length: int  # values in a contribution: a scalar per direction, or a number per weight
    digest: bytes
    seeds: Seeds
    supports: tuple[Support, ...]
    ring: Ring
    rule: Rule

    def weight_of(self, samples: int) -> int:
        """N_c: what a client of so many samples counts for."""
        return 1 if self.plan.federation.weighting == "uniform" else min(samples, self.plan.ring.n_max)

    def directions(self, key_number: int) -> Directions:
        """The directions of a round, by the number of its key."""
        return _directions(self.plan, self.seeds, key_number)


def trajectory(plan: Plan, n: int) -> Trajectory:
    """What a resolved plan means for a model of n weights."""
    digest = plan.trajectory_digest()
    seeds, supports, ring = Seeds(plan.seed, digest), dense(n, plan.probe.k), _ring(plan)
    length = n if plan.outcome_kind == "vector" else len(supports)

    def gradient(outcome: Outcome) -> F32:
        group, totals = _only_group(outcome, plan.outcome_kind, length)
        if outcome.kind == "vector":
            return gradient_from_vector(totals, group.weight, ring)
        return gradient_from_scalars(totals, group.weight, _directions(plan, seeds, group.key), supports, n, ring)

    # At epoch level the clients have stepped already: what they send is minus their weight change, and one plain
    # step of rate 1 along it is federated averaging.
    step = optimizer(plan.update) if plan.federation.level == "batch" else sgd(1.0)
    smooth = average(plan.update.ema) if plan.update.ema else no_average()
    return Trajectory(plan, n, length, digest, seeds, supports, ring, Rule(gradient, step, smooth))


def _directions(plan: Plan, seeds: Seeds, key_number: int) -> Directions:
    only_group = 0
    return Directions(seeds.key("directions", key_number, only_group), DISTRIBUTIONS[plan.probe.distribution])


def _only_group(outcome: Outcome, kind: str, length: int) -> tuple[Group, I32]:
    """The group of an outcome that fits the plan."""
    if outcome.kind != kind or len(outcome.groups) != 1:
        raise MessageError(
            f"round {outcome.round} has {len(outcome.groups)} groups of kind {outcome.kind}, expected one of {kind}"
        )
    (group,) = outcome.groups
    if group.weight < 1 or group.key < 0 or len(group.totals) != 4 * length:
        raise MessageError(
            f"round {outcome.round} holds {len(group.totals)} bytes of totals with key {group.key} and weight "
            f"{group.weight}, expected {4 * length} bytes, a key number and a positive weight"
        )
    return group, group.numbers()


def optimizer(settings: Update) -> Transform:
    """The chain that the plan's [update] names."""
    steps: dict[str, Transform] = {
        "adam": adam(settings.rate, *settings.betas),
        "momentum": momentum(settings.rate, settings.momentum),
        "sgd": sgd(settings.rate),
    }
    before = [clip(settings.clip)] if settings.clip else []
    before += [weight_decay(settings.weight_decay)] if settings.weight_decay else []
    return chain(*before, steps[settings.optimizer])


def _ring(plan: Plan) -> Ring:
    if plan.outcome_kind == "vector":
        return Ring(plan.per_round, plan.ring.n_max, plan.ring.update_max)
    smallest = min((tier.k for tier in plan.federation.tiers), default=plan.probe.k)
    return Ring(plan.per_round, plan.ring.n_max, plan.ring.d_max, Fraction(plan.probe.k, smallest))
