"""`tune`: a plan in, the same plan with σ, rate, K and batch chosen for its model and data, and a reason for each."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from baffle.errors import PlanError
from baffle.plan import Plan, change
from baffle.runtime.registry import runtime_of
from baffle.task.choice import seconds_of, told
from baffle.task.costs import expected_alignment
from baffle.task.features import Backbones
from baffle.task.settling import prices_of
from baffle.task.window import Window
from baffle.tune.cheaper import judge_prices
from baffle.tune.race import Race, best_rate, extended, race
from baffle.tune.split import Split, compare, splits_of
from baffle.tune.trial import Ground, Spent

Tell = Callable[[str, int, int], None]
"""Takes a step in words, the rounds of trials so far, and about how many there will be."""

SIGMAS_TO_TRY = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
"""Steps for a loss without derivatives: the best is found by trials."""


@dataclass(frozen=True)
class Reason:
    """A setting, what the plan had, what was chosen, and why."""

    key: str
    before: float | int
    after: float | int
    why: str


@dataclass(frozen=True)
class Tuned:
    """A plan with chosen settings."""

    plan: Plan
    reasons: tuple[Reason, ...]
    """One for each of σ, rate, K and batch, whether it was changed or not, and for a clipping norm that was missing."""
    alignment_predicted: float
    """The cosine of a round's estimate and the gradient of its samples."""
    alignment_measured: float | None
    """The cosine with the gradient of all samples, at the end of the race; None where it cannot be had from scalars."""
    trial_rounds: int
    forwards: int
    share: float
    """Forward passes of the trials, as a share of those of the run."""
    prices: dict[str, float]
    """CPU seconds of a scalar on this machine, along each kind of directions that the model allows."""
    advice: tuple[str, ...]
    """On directions that cost half of the plan's or less."""
    seconds: float = 0.0

    def to_toml(self) -> str:
        """The plan, below a comment for each choice."""
        lines = [f"# {line}" for line in self.lines()]
        return "\n".join([*lines, "", self.plan.to_toml()])

    def lines(self) -> list[str]:
        """What was chosen, why, and what it cost."""
        measured = (
            "" if self.alignment_measured is None else f"; {self.alignment_measured:.3f} with that of all samples"
        )
        return [
            *(f"{reason.key} = {reason.after:g}{_before(reason)}: {reason.why}" for reason in self.reasons),
            f"alignment: cos {self.alignment_predicted:.3f} expected with the gradient of a round's samples{measured}",
            f"CPU time of a scalar: {told(self.prices)}",
            *self.advice,
            f"the trials took {self.trial_rounds} rounds, {self.forwards:,} forward passes "
            f"({self.share:.0%} of the run's), {self.seconds:.0f} s",
        ]


def _before(reason: Reason) -> str:
    return " (as it was)" if reason.after == reason.before else f" (was {reason.before:g})"


def tune(plan: Plan, *, data: str | Path | None = None, tell: Tell = lambda _words, _done, _of: None) -> Tuned:
    """Choose σ, rate, K and batch for a plan by short trials on its training samples.

    The choice depends on the plan's seed, data, model and rounds, and on K times batch, but not on its σ and rate, so a
    start that is far off is as good as any. Test samples play no part.
    """
    _require_tunable(plan)
    began = time.perf_counter()
    tuning = _Tuning(plan, data, tell)
    with tuning.ground.task.model.one_thread_each():
        tuned = tuning.find()
    return replace(tuned, seconds=time.perf_counter() - began)


def _require_tunable(plan: Plan) -> None:
    if plan.estimator != "probe":
        raise PlanError('estimator: "backprop" has no σ and no directions to choose; expected "probe"')


@dataclass
class _Tuning:
    """The state of one tuning."""

    original: Plan
    data: str | Path | None
    tell: Tell
    spent: Spent = field(default_factory=Spent)
    backbones: Backbones = field(default_factory=Backbones)
    why_split: str = ""

    def __post_init__(self) -> None:
        self.plan = change(self.original, [f'run.runtime = "{runtime_of(self.original)}"'])
        self.ground = self._ground(self.plan)

    def _ground(self, plan: Plan) -> Ground:
        return Ground(plan, self.data, self.spent, self.backbones)

    def _say(self, words: str) -> None:
        self.tell(words, self.spent.rounds, round(1.5 * self.original.rounds))

    def find(self) -> Tuned:
        plan, ground = self.original, self.ground
        first, sigma, why_sigma = self._first_sigma()
        race_sigma = sigma
        raced = race(ground, sigma, plan.rounds, self._say)
        split = self._split(sigma, raced)
        if split is not None:
            ground, raced = split.ground, split.race
        if first.smooth:
            later = ground.window(raced.winner.trial)
            sigma, why_sigma = _choose_sigma(first, later, raced.rounds)
        rate = rounded(extended(best_rate(raced.legs[-1]), raced.rounds, plan.rounds))
        chosen = ground.plan
        settings = {
            "probe.sigma": (plan.probe.sigma, sigma, why_sigma),
            "update.rate": (plan.update.rate, rate, _why_rate(raced, plan.rounds)),
            "probe.k": (plan.probe.k, chosen.probe.k, self.why_split),
            "federation.batch": (plan.federation.batch, chosen.federation.batch, "K times batch stays the same"),
        }
        if self.ground.why_clip:
            settings["privacy.clip"] = (0.0, self.ground.plan.privacy.clip, self.ground.why_clip.partition(": ")[2])
        reasons = tuple(Reason(key, *value) for key, value in settings.items())
        predicted = expected_alignment(ground.trajectory)
        signal = ground.signal(raced.winner.trial)
        prices, advice = self._prices(ground, race_sigma, raced)
        return Tuned(
            _changed(plan, reasons),
            reasons,
            predicted,
            None if signal is None else predicted * math.sqrt(signal),
            self.spent.rounds,
            self.spent.forwards,
            self.spent.forwards / (self.ground.forwards_a_round * plan.rounds),
            prices,
            advice,
        )

    def _prices(self, ground: Ground, sigma: float, raced: Race) -> tuple[dict[str, float], tuple[str, ...]]:
        """What a scalar costs along each kind of directions, and what to make of cheaper ones."""
        self._say("what a scalar costs")
        prices = prices_of(ground.task.server, max(map(len, ground.task.shares)), given=True)
        advice = judge_prices(ground, sigma, raced, prices, self.data, self.backbones, self._say)
        return seconds_of(prices), tuple(advice)

    def _first_sigma(self) -> tuple[Window, float, str]:
        """A σ for the race, from the window at the initial weights."""
        self._say("σ at the initial weights")
        window = self.ground.window(self.ground.begin(SIGMAS_TO_TRY[0], 1.0))
        if window.smooth:
            return window, rounded(window.middle), ""
        losses = {sigma: self._loss_with(sigma) for sigma in SIGMAS_TO_TRY}
        best = min(losses, key=lambda sigma: losses[sigma])
        tried = ", ".join(f"{loss:.4g} at {sigma:g}" for sigma, loss in losses.items())
        return window, best, f"scalars agree at no two steps, so short trials decided: held-out loss {tried}"

    def _loss_with(self, sigma: float) -> float:
        """The held-out loss after the first leg of a race with this σ."""
        self._say(f"σ = {sigma:g}")
        raced = race(self.ground, sigma, self.original.rounds, lambda _words: None, legs=1)
        return raced.winner.loss

    def _split(self, sigma: float, raced: Race) -> Split | None:
        """A better split of the same rows into directions and samples, if a trial finds one."""
        tried = list[str]()
        best: Split | None = None
        if self.plan.privacy.on:  # how long a vector is depends on K, and so would its clipping norm
            self.why_split = "another split was not tried, because the clipping norm is for this K"
            return None
        for k, batch in splits_of(self.ground.task):
            self._say(f"K = {k} on {batch} samples")
            other = compare(
                self._ground(with_split(self.plan, k, batch)), sigma, self.original.rounds, raced, self._say
            )
            tried.append(f"{other.race.winner.loss:.4g} with K = {k} on {batch}")
            if other.is_better and (best is None or other.race.winner.loss < best.race.winner.loss):
                best = other
        own = f"{raced.winner.loss:.4g} with K = {self.plan.probe.k} on {self.plan.federation.batch} samples a client"
        rounds = raced.rounds
        if not tried:
            self.why_split = "no other split of the same forward passes was possible"
        else:
            verdict = "clearly lower" if best else "no clear gain from another split"
            self.why_split = f"held-out loss after {rounds} rounds {own}, {', '.join(tried)}: {verdict}"
        return best


def _changed(plan: Plan, reasons: tuple[Reason, ...]) -> Plan:
    """The plan with what was chosen. A layout that was made for another K is left to the run again."""
    settings = [f"{reason.key}={reason.after!r}" for reason in reasons if reason.after != reason.before]
    stale = plan.probe.layout and any(setting.startswith("probe.k=") for setting in settings)
    return change(plan, [*settings, *(["probe.layout=[]"] if stale else [])])


def with_split(plan: Plan, k: int, batch: int) -> Plan:
    """The plan with other K and batch. What a run fills in itself is left to it again."""
    return msgspec.structs.replace(
        plan,
        probe=msgspec.structs.replace(plan.probe, k=k, layout=()),
        federation=msgspec.structs.replace(plan.federation, batch=batch),
    )


def _choose_sigma(first: Window, later: Window, rounds: int) -> tuple[float, str]:
    """The middle of what both windows allow."""
    both = first.meet(later)
    return rounded(both.middle), (
        f"below {both.low:.1g} rounding, above {both.high:.1g} curvature makes over a tenth of a scalar "
        f"({first.low:.1g} to {first.high:.1g} at the initial weights, {later.low:.1g} to {later.high:.1g} after "
        f"{rounds} rounds); this is the middle"
    )


def _why_rate(raced: Race, rounds: int) -> str:
    leg = raced.legs[-1]
    tried = ", ".join(f"{loss:.4g} at {rate:g}" for rate, loss in sorted(leg.losses.items()))
    longer = f", times √({leg.rounds}/{rounds}) for the longer run" if leg.rounds < rounds else ""
    return f"held-out loss after {leg.rounds} rounds {tried}; the best{longer}"


def rounded(value: float) -> float:
    """Two digits."""
    return float(f"{value:.2g}")
