"""`tune` chooses σ, rate, K and batch for a plan's model and data, and gives a reason for each.

Besides σ and the rate it tries another split of the same rows into K and batch, and directions that cost less.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from baffle.client.abstaining import Tell
from baffle.errors import NoHeadError, PlanError
from baffle.measuring.costs import expected_alignment
from baffle.measuring.precision import Window
from baffle.plan import Plan, change
from baffle.runtime.registry import runtime_of
from baffle.task.load import Task
from baffle.task.prices import OPEN, Prices, cheaper_kind, in_words, kind_of, seconds_of
from baffle.task.server_task import with_settings
from baffle.task.settle import prices_of
from baffle.tune.race import Leg, Race, Runner, best_rate, extended, legs_of, nearest, race, run_trial, series
from baffle.tune.trial import Ground, Loader, Spent, from_folder

TellProgress = Callable[[str, int, int], None]
"""Takes a step in words, the rounds of trials so far, and about how many there will be."""

SIGMAS_TO_TRY = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)  # for a loss without derivatives: the best is found by trials
FACTOR = 4  # splits are tried with so many times the directions, or the samples
LEAST_SAMPLES = 8  # a client's default policy refuses rounds with fewer samples
LEAST_DIRECTIONS = 8  # with fewer directions a round says next to nothing
SURE = 2.0  # a loss is clearly lower if it is so by this many standard errors, over the pieces of the held-out samples


NOTHING_LEARNT = (
    "nothing was learnt: no rate lowered the held-out loss by more than chance, also not with directions of one layer "
    "each, an exact head, more directions or all rounds, where the plan allows them. Look at the data and the model, "
    "or set more rounds"
)


@dataclass(frozen=True)
class Reason:
    """A setting, what the plan had, what was chosen, and why."""

    key: str
    before: float | int | str
    after: float | int | str
    why: str

    def __str__(self) -> str:
        values = (self.before, self.after)
        before, after = (f'"{value}"' if isinstance(value, str) else f"{value:g}" for value in values)
        was = " (as it was)" if self.after == self.before else f" (was {before})"
        return f"{self.key} = {after}{was}: {self.why}"


@dataclass(frozen=True)
class Tuned:
    """A plan with chosen settings."""

    plan: Plan
    reasons: tuple[Reason, ...]
    """One for each of σ, rate, K and batch, whether it was changed or not; for a clipping norm that was missing; and
    for other directions without which nothing was learnt."""
    learnt: bool
    """Whether any trial lowered the held-out loss by more than chance; if not, no rate is better than others."""
    alignment_predicted: float  # the cosine of a round's estimate and the gradient of its samples
    alignment_measured: float | None
    """The cosine with the gradient of all samples, at the end of the race; None where scalars do not tell it."""
    trial_rounds: int
    forwards: int
    share: float  # forward passes of the trials, as a share of those of the run
    prices: dict[str, float]
    """CPU seconds of a scalar on this machine, along each kind of directions that the model allows."""
    advice: tuple[str, ...]  # on directions that cost half of the plan's or less
    seconds: float = 0.0

    def to_toml(self) -> str:
        """The plan, below a comment for each choice."""
        return "\n".join([*(f"# {line}" for line in self.lines()), "", self.plan.to_toml()])

    def lines(self) -> list[str]:
        """What was chosen, why, and what it cost."""
        predicted, measured = f"cos {self.alignment_predicted:.3f}", ""
        if self.alignment_measured is not None:
            measured = f"; {self.alignment_measured:.3f} with that of all samples"
        return [
            *map(str, self.reasons),
            f"alignment: {predicted} expected with the gradient of a round's samples{measured}",
            f"CPU time of a scalar: {in_words(self.prices)}",
            *self.advice,
            f"the trials took {self.trial_rounds} rounds, {self.forwards:,} forward passes "
            f"({self.share:.0%} of the run's), {self.seconds:.0f} s",
        ]


def tune(
    plan: Plan,
    *,
    data: str | Path | None = None,
    tell: TellProgress = lambda _words, _done, _of: None,
    load: Loader | None = None,
) -> Tuned:
    """Choose σ, rate, K and batch for a plan by short trials on its training samples. `load` loads a task that no plan
    can name.

    The choice depends on the plan's seed, data, model and rounds, and on K times batch, but not on its σ and rate.
    Test samples are never used.
    """
    if plan.estimator != "probe":
        raise PlanError(f'estimator: "{plan.estimator}" has no σ and no scalars to probe; expected "probe"')
    began = time.perf_counter()
    asked = change(plan, [f'run.runtime = "{runtime_of(plan)}"'])
    ground = Ground(asked, load or from_folder(data), Spent())
    with ground.task.model.one_thread_each():
        tuned = _find(plan, ground, lambda words: tell(words, ground.spent.rounds, round(1.5 * plan.rounds)))
    return replace(tuned, seconds=time.perf_counter() - began)


def _find(plan: Plan, ground: Ground, say: Tell) -> Tuned:
    """The plan with everything chosen, from its own ground."""
    first, race_sigma, why_sigma = _first_sigma(ground, say)
    split = _split(ground, race_sigma, race(ground, race_sigma, plan.rounds, say), say)
    learning = split if has_learnt(split) else _attempt(split, race_sigma, say)
    split, learnt = learning or split, learning is not None
    chosen, raced, sigma = split.ground.plan, split.race, race_sigma
    if first.smooth:
        sigma, why_sigma = _choose_sigma(first, split.ground.window(raced.winner.trial), raced.rounds)
    raced_steps, steps = ground.plan.steps_before(raced.rounds), plan.steps_before(plan.rounds)
    rate = rounded(extended(best_rate(raced.legs[-1]), raced_steps, steps))
    settings = {
        "probe.sigma": (plan.probe.sigma, sigma, why_sigma),
        "update.rate": (plan.update.rate, rate, _why_rate(raced, raced_steps, steps, learnt=learnt)),
        "probe.k": (plan.probe.k, chosen.probe.k, split.why),
        "federation.batch": (plan.federation.batch, chosen.federation.batch, _why_batch(plan, chosen)),
    }
    for key in ("supports", "head"):
        if (before := getattr(ground.asked.probe, key)) != (after := getattr(split.ground.asked.probe, key)):
            settings[f"probe.{key}"] = (before, after, split.why)
    if ground.why_clip:
        settings["privacy.clip"] = (0.0, ground.plan.privacy.clip, ground.why_clip.partition(": ")[2])
    reasons = tuple(Reason(key, *value) for key, value in settings.items())
    predicted = expected_alignment(split.ground.trajectory)
    signal = split.ground.signal(raced.winner.trial)
    say("what a scalar costs")
    prices = prices_of(split.ground.task, split.ground.task.largest)
    advice = [] if learnt else [NOTHING_LEARNT]
    advice += _judge_prices(split.ground, race_sigma, raced, prices, say)
    if learnt:
        advice += _judge_head(split.ground, race_sigma, raced, say)
    return Tuned(
        plan=_changed(plan, reasons),
        reasons=reasons,
        learnt=learnt,
        alignment_predicted=predicted,
        alignment_measured=None if signal is None else predicted * math.sqrt(signal),
        trial_rounds=ground.spent.rounds,
        forwards=ground.spent.forwards,
        share=ground.spent.forwards / (ground.forwards_a_round * plan.rounds),
        prices=seconds_of(prices),
        advice=tuple(advice),
    )


def _changed(plan: Plan, reasons: tuple[Reason, ...]) -> Plan:
    """The plan with what was chosen. A layout that was made for another K is left to the run again."""
    settings = [f"{reason.key}={reason.after!r}" for reason in reasons if reason.after != reason.before]
    stale = plan.probe.layout and any(setting.startswith("probe.k=") for setting in settings)
    return change(plan, [*settings, *(["probe.layout=[]"] if stale else [])])


def _first_sigma(ground: Ground, say: Tell) -> tuple[Window, float, str]:
    """A σ for the race, from the window at the initial weights; for a loss without derivatives, from short trials."""
    say("σ at the initial weights")
    window = ground.window(ground.begin(SIGMAS_TO_TRY[0], 1.0))
    if window.smooth:
        return window, rounded(window.middle), ""
    losses = dict[float, float]()
    for sigma in SIGMAS_TO_TRY:
        say(f"σ = {sigma:g}")
        losses[sigma] = race(ground, sigma, ground.plan.rounds, lambda _words: None, legs=1).winner.loss
    best = min(losses, key=lambda sigma: losses[sigma])
    tried = ", ".join(f"{loss:.4g} at {sigma:g}" for sigma, loss in losses.items())
    return window, best, f"scalars agree at no two steps, so short trials decided: held-out loss {tried}"


def _choose_sigma(first: Window, later: Window, rounds: int) -> tuple[float, str]:
    """The middle of what both windows allow."""
    both = first.meet(later)
    return rounded(both.middle), (
        f"below {both.low:.1g} rounding, above {both.high:.1g} curvature makes over a tenth of a scalar "
        f"({first.low:.1g} to {first.high:.1g} at the initial weights, {later.low:.1g} to {later.high:.1g} after "
        f"{rounds} rounds); this is the middle"
    )


def _why_batch(before: Plan, after: Plan) -> str:
    rows = (plan.probe.k * plan.federation.batch for plan in (before, after))
    return "K times batch stays the same" if len(set(rows)) == 1 else "more directions alone"


def _why_rate(raced: Race, raced_steps: int, steps: int, *, learnt: bool) -> str:
    leg = raced.legs[-1]
    tried = ", ".join(f"{loss:.4g} at {rate:g}" for rate, loss in sorted(leg.losses.items()))
    if not learnt:
        return f"nothing was learnt at any rate: held-out loss after {leg.rounds} rounds {tried}, no less than at first"
    longer = f", times √({raced_steps}/{steps}) for the longer run" if raced_steps < steps else ""
    return f"held-out loss after {leg.rounds} rounds {tried}; the best{longer}"


def rounded(value: float) -> float:
    """Two digits."""
    return float(f"{value:.2g}")


class Split(NamedTuple):
    """A split of the same rows into directions and samples, how it did, and why it was chosen."""

    ground: Ground
    race: Race
    why: str


def _split(ground: Ground, sigma: float, own: Race, say: Tell) -> Split:
    """The plan's own split, or a better one if a trial finds it."""
    plan, best, tried = ground.asked, Split(ground, own, ""), list[str]()
    if plan.privacy.on:  # how long a vector is depends on K, and so would its clipping norm
        return best._replace(why="another split was not tried, because the clipping norm is for this K")
    for k, batch in splits_of(ground.task):
        say(f"K = {k} on {batch} samples")
        other = ground.of(with_settings(plan, probe={"k": k, "layout": ()}, federation={"batch": batch}))
        raced = _race_split(other, sigma, own, say)
        tried.append(f"{raced.winner.loss:.4g} with K = {k} on {batch}")
        is_least = best.race is own or raced.winner.loss < best.race.winner.loss
        if is_least and is_clearly_less(raced.winner, own.winner):
            best = Split(other, raced, "")
    if not tried:
        return best._replace(why="no other split of the same forward passes was possible")
    losses = f"{own.winner.loss:.4g} with K = {plan.probe.k} on {plan.federation.batch} samples a client"
    verdict = "no clear gain from another split" if best.race is own else "clearly lower"
    return best._replace(why=f"held-out loss after {own.rounds} rounds {losses}, {', '.join(tried)}: {verdict}")


def has_learnt(split: Split) -> bool:
    """Whether the race's winner is clearly better than the initial weights."""
    untrained = split.ground.begin(1.0, 1.0)
    return is_clearly_less(split.race.winner, Runner(0.0, untrained, split.ground.losses(untrained)))


def _attempt(stuck: Split, sigma: float, say: Tell) -> Split | None:
    """What learns where the plan does not: directions of one layer each, an exact head, more directions, or the whole
    run instead of a part of it. None if nothing does. The clipping norm of a private plan is for its own directions."""
    plan, rounds = stuck.ground.asked, stuck.ground.plan.rounds
    attempts = {"supports": "layers", "head": "exact", "k": FACTOR * plan.probe.k}
    for key, value in attempts.items() if not plan.privacy.on else ():
        if getattr(plan.probe, key) == value or (key == "supports" and plan.probe.supports != "dense"):
            continue
        say(f"nothing was learnt yet: trying probe.{key} = {value}")
        try:
            other = stuck.ground.of(with_settings(plan, probe={"layout": (), key: value}))
        except PlanError:  # not with this model
            continue
        found = Split(other, race(other, sigma, rounds, say), f"with {getattr(plan.probe, key)} nothing was learnt")
        if has_learnt(found):
            return found
    say(f"nothing was learnt yet: going on to {rounds} rounds")
    winner = run_trial(stuck.ground, stuck.race.winner.trial, rounds)
    found = stuck._replace(race=Race(winner, [*stuck.race.legs, Leg(rounds, {winner.rate: winner.loss})]))
    return found if has_learnt(found) else None


def splits_of(task: Task) -> list[tuple[int, int]]:
    """Other pairs of K and batch with the same rows. None at epoch level, where a client's steps would change too, and
    none for tiers, whose own K would have to change."""
    plan = task.plan
    k, batch = plan.probe.k, plan.federation.batch
    smallest = min(len(share) for share in task.shares)
    if plan.federation.level == "epoch" or plan.federation.tiers or not batch or batch > smallest:
        return []
    found = []
    if batch % FACTOR == 0 and batch // FACTOR >= LEAST_SAMPLES:
        found.append((k * FACTOR, batch // FACTOR))
    if k % FACTOR == 0 and k // FACTOR >= LEAST_DIRECTIONS and batch * FACTOR <= smallest:
        found.append((k // FACTOR, batch * FACTOR))
    return found


def _race_split(ground: Ground, sigma: float, reference: Race, say: Tell) -> Race:
    """Race a split at two rates, that of the reference and the next one: more directions make estimates better and
    afford larger steps, fewer need smaller ones. The better goes on to where the reference ended."""
    *_, middle, end = legs_of(ground.plan.rounds)
    more = ground.plan.probe.k > reference.winner.trial.trajectory.plan.probe.k
    here = nearest(reference.winner.rate)
    runners = []
    for rate in (series(here), series(here + (1 if more else -1))):
        runners.append(run_trial(ground, ground.begin(sigma, rate), middle))
        say(f"K = {ground.plan.probe.k}, rate {rate:g}: loss {runners[-1].loss:.4g} after {middle} rounds")
    winner = run_trial(ground, min(runners, key=lambda runner: runner.loss).trial, end)
    return Race(winner, [Leg(end, {winner.rate: winner.loss})])


def _judge_prices(ground: Ground, sigma: float, reference: Race, prices: Prices, say: Tell) -> list[str]:
    """Advice on directions that cost half of the plan's or less. A trial has as many of them, the rate of the race's
    winner and as many rounds. It is not counted with the others, because whether it is made depends on how quick this
    machine is."""
    plan, winner = ground.plan, reference.winner
    cheaper = cheaper_kind(plan.probe, prices)
    if cheaper is None:
        return []
    if plan.privacy.on:
        return [f"{cheaper.saving}; no trial, because the clipping norm is for the plan's own ({cheaper.remedy})"]
    say(f"{cheaper.kind} instead of {kind_of(plan.probe)}, rate {winner.rate:g}")
    other = ground.of(with_settings(plan, probe={**OPEN, **prices[cheaper.kind].settings}), counted=False)
    runner = run_trial(other, other.begin(sigma, winner.rate), reference.rounds)
    losses = f"{runner.loss:.4g} against {winner.loss:.4g}"
    return [
        f"{cheaper.saving}; held-out loss after {reference.rounds} rounds at the same rate {losses}, "
        f"{verdict(runner, winner, cheaper.remedy)}"
    ]


def _judge_head(ground: Ground, sigma: float, reference: Race, say: Tell) -> list[str]:
    """Advice on an exact last layer, if the model has one, the plan probes it, and a trial with the rate of the race's
    winner and as many rounds is clearly better. Whether that is worth its bytes is for the user to say."""
    plan, winner = ground.plan, reference.winner
    if plan.probe.head == "exact" or plan.privacy.on:
        return []
    try:
        other = ground.of(with_settings(plan, probe={"head": "exact", "layout": ()}), counted=False)
    except NoHeadError:
        return []
    say(f"the last layer exactly, rate {winner.rate:g}")
    runner = run_trial(other, other.begin(sigma, winner.rate), reference.rounds)
    if not is_clearly_less(runner, winner):
        return []
    return [
        f"the last layer exactly: held-out loss after {reference.rounds} rounds at the same rate {runner.loss:.4g} "
        f'against {winner.loss:.4g}, clearly lower: set probe.head = "exact", for '
        f"{4 * other.trajectory.plan.head_size:,} bytes more a client and round"
    ]


def verdict(cheap: Runner, own: Runner, remedy: str) -> str:
    """Whether cheaper directions train as well, in words."""
    if is_clearly_less(own, cheap):
        return "clearly higher: the plan keeps its own, unless more rounds or directions make up for it"
    return f"{'clearly lower' if is_clearly_less(cheap, own) else 'no clear difference'}: {remedy}"


def is_clearly_less(one: Runner, other: Runner) -> bool:
    """Whether a loss is lower by more than chance, piece by piece on the same held-out samples."""
    if not np.isfinite(one.losses).all():
        return False
    gains = other.losses - one.losses
    if not np.isfinite(gains).all():
        return True
    error = float(np.std(gains, ddof=1)) / np.sqrt(len(gains)) if len(gains) > 1 else np.inf
    return float(np.mean(gains)) > SURE * error
