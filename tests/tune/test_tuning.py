"""`tune`: the same advice from any σ and rate, with reasons; other splits and cheaper directions; plans that it cannot
help."""

import tomllib
from collections.abc import Callable
from contextlib import chdir
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from baffle.errors import PlanError
from baffle.plan import Plan, parse
from baffle.simulation import simulate
from baffle.task.prices import Price, Prices
from baffle.tune import tuning
from baffle.tune.race import Runner
from baffle.tune.trial import Ground, Spent, from_folder, shared_variance, split_off
from baffle.tune.tuning import SIGMAS_TO_TRY, Tuned, splits_of, tune, verdict
from tests.conftest import TINY

MakePlan = Callable[..., Plan]

ROUNDS = "rounds=8"
DENSE = Price(1e-3, {"supports": "dense", "distribution": "rademacher"})
STAGES = Price(1e-4, {"supports": "stages", "distribution": "rademacher"})
ALIKE = {"dense": DENSE, "stages": STAGES._replace(seconds=9e-4)}


@pytest.fixture(autouse=True)
def _prices_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """A measurement takes longer than these trials. `tests/cli/test_commands.py` tunes with real prices."""
    monkeypatch.setattr(tuning, "prices_of", lambda *_task: ALIKE)


@cache
def tuned(*settings: str) -> Tuned:
    return tune(parse(TINY, [ROUNDS, "probe.k=16", *settings]))


SMALL = ("probe.sigma=1e-5", "update.rate=1e-4", "run.workers=3")
LARGE = ("probe.sigma=0.1", "update.rate=1e4", "run.workers=1")


@pytest.mark.parametrize("wrong", [SMALL, LARGE], ids=["small", "large"])
def test_the_advice_does_not_depend_on_sigma_rate_and_workers(wrong: tuple[str, ...]) -> None:
    right, other = tuned(), tuned(*wrong)
    assert [(reason.key, reason.after) for reason in other.reasons] == [(r.key, r.after) for r in right.reasons]
    assert (other.forwards, other.trial_rounds) == (right.forwards, right.trial_rounds)
    assert other.plan.update == right.plan.update


@pytest.mark.parametrize("level", [(), ("federation.level=epoch", "federation.steps=2")])
def test_trials_are_too_short_for_a_schedule_of_the_rate(tiny: MakePlan, level: tuple[str, ...]) -> None:
    rising = ("update.schedule=warm-up", "update.schedule_rounds=1000", ROUNDS, *level)
    trials = [Ground(tiny(*settings), from_folder(), Spent()) for settings in ((ROUNDS, *level), rising)]
    begun = [ground.begin(1e-3, 0.1) for ground in trials]
    assert [trial.trajectory.plan for trial in begun] == [begun[0].trajectory.plan] * 2
    ends = [ground.advance(trial, 2).present.state.weights for ground, trial in zip(trials, begun, strict=True)]
    np.testing.assert_array_equal(ends[0], ends[1])


def test_another_seed_is_another_trial() -> None:
    assert tuned("seed=5").reasons != tuned().reasons


def test_every_setting_has_a_reason_and_nothing_else_changes() -> None:
    advice = tuned()
    sigma, rate, k, batch = (reason.after for reason in advice.reasons)
    keys = ["probe.sigma", "update.rate", "probe.k", "federation.batch"]
    assert [reason.key for reason in advice.reasons] == keys
    chosen = [f"{key}={value}" for key, value in zip(keys, (sigma, rate, k, batch), strict=True)]
    assert advice.plan == parse(TINY, [ROUNDS, *chosen])
    assert advice.learnt
    assert advice.forwards > 0
    assert advice.share == pytest.approx(advice.forwards / (8 * 3 * 17), rel=1e-6)
    assert 0 <= (advice.alignment_measured or 0) <= advice.alignment_predicted


def test_where_nothing_is_learnt_no_rate_is_called_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "is_clearly_less", lambda *_runners: False)
    said: list[str] = []
    stuck = tune(parse(TINY, [ROUNDS, "probe.k=16"]), tell=lambda words, _done, _of: said.append(words))
    assert not stuck.learnt
    rate = stuck.reasons[1]
    assert rate.why.startswith("nothing was learnt at any rate: held-out loss after ")
    assert "the best" not in rate.why
    assert "nothing was learnt: no rate lowered the held-out loss" in stuck.to_toml()
    assert [words.partition(": ")[2] for words in said if words.startswith("nothing was learnt yet")] == [
        "trying probe.supports = layers",
        "trying probe.head = exact",
        "trying probe.k = 64",
        "going on to 8 rounds",
    ]


def test_what_learns_is_found_where_the_plan_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if only an exact head had learnt: whether a few directions have, is chance."""
    clearly_less = tuning.is_clearly_less

    def is_exact_and_less(one: Runner, other: Runner) -> bool:
        return one.trial.trajectory.plan.probe.head == "exact" and clearly_less(one, other)

    monkeypatch.setattr(tuning, "is_clearly_less", is_exact_and_less)
    lenet = 'task.model={name="lenet", channels=[8, 16], head="flatten"}'
    found = tune(parse(TINY, [lenet, "rounds=12", "probe.k=1", "federation.batch=0"]))
    assert found.learnt
    (reason,) = (reason for reason in found.reasons if reason.key in ("probe.head", "probe.supports"))
    assert str(reason) == 'probe.head = "exact" (was "probed"): with probed nothing was learnt'
    assert (found.plan.probe.head, found.plan.probe.supports) == ("exact", "dense")


def test_the_plan_is_written_with_its_reasons_as_comments() -> None:
    wrong = tuned(*LARGE)
    text = wrong.to_toml()
    assert "# update.rate = " in text
    assert "(was 10000): held-out loss" in text
    assert parse(text) == wrong.plan
    assert tomllib.loads(text)["name"] == "tiny"


def test_the_rate_of_another_optimizer_is_found_too(tiny: MakePlan, tmp_path: Path) -> None:
    slow = tiny("rounds=12", "probe.k=16", "update.optimizer=sgd", "update.rate=1e-5")
    before, after = (simulate(plan, tmp_path / name) for name, plan in (("before", slow), ("after", tune(slow).plan)))
    assert after["train_loss"] < before["train_loss"] - 0.1


def test_rounds_of_several_steps_are_tried_and_a_rate_is_extended_by_steps(tiny: MakePlan) -> None:
    local = ("federation.local_steps=4", "federation.warm_up=10", "federation.batch=8")
    tuned = tune(tiny("rounds=24", *local))
    reason = next(reason for reason in tuned.reasons if reason.key == "update.rate")
    assert "held-out loss after 6 rounds" in reason.why
    assert f"times √({3 + 3 * 4}/{10 + 14 * 4})" in reason.why
    assert (tuned.plan.federation.local_steps, tuned.plan.federation.warm_up) == (4, 10)


def test_at_epoch_level_the_rate_is_tuned_and_the_split_stays(tiny: MakePlan) -> None:
    advice = tune(tiny("rounds=4", 'federation.level="epoch"', "federation.batch=200", "update.rate=10.0"))
    assert advice.plan.update.rate < 10
    assert advice.plan.federation.batch == 200
    assert advice.alignment_measured is None


OWN_MODELS = """
from torch import nn

class Own(nn.Module):
    def __init__(self, shape, classes, spoil):
        super().__init__()
        self.linear = nn.Linear(shape[0] * shape[1] * shape[2], classes)
        self.spoil = spoil

    def forward(self, x):
        return self.spoil(self.linear(x.flatten(1)))

def stepped(shape, classes):
    return Own(shape, classes, lambda outputs: (5 * outputs).round())

def signs(shape, classes):
    return Own(shape, classes, lambda outputs: 1e-9 * outputs.sign())
"""


def advice_on(model: str, tiny: MakePlan, folder: Path) -> Tuned:
    (folder / "own_models.py").write_text(OWN_MODELS)
    with chdir(folder):
        return tune(tiny("rounds=4", "probe.k=16", f'task.model={{name="custom", factory="own_models:{model}"}}'))


def test_a_loss_without_derivatives_gets_a_sigma_that_sees_beyond_its_grain(tiny: MakePlan, tmp_path: Path) -> None:
    assert advice_on("stepped", tiny, tmp_path).plan.probe.sigma >= 0.01


def test_where_no_two_steps_agree_trials_choose_sigma(tiny: MakePlan, tmp_path: Path) -> None:
    advice = advice_on("signs", tiny, tmp_path)
    assert "short trials decided" in advice.reasons[0].why
    assert advice.plan.probe.sigma in SIGMAS_TO_TRY


def test_backpropagation_is_refused(tiny: MakePlan) -> None:
    with pytest.raises(PlanError, match=r'estimator: "backprop" has no σ.*expected "probe"'):
        tune(tiny('estimator="backprop"'))


def test_held_out_samples_are_trained_on_by_nobody() -> None:
    shares = [np.arange(0, 50), np.arange(50, 130), np.arange(130, 131)]
    kept, out = split_off(shares, 7)
    assert sorted(np.concatenate([*kept, out])) == list(range(131))
    assert [len(share) for share in kept][2] == 1
    assert 15 <= len(out) <= 27
    again, _ = split_off(shares, 7)
    assert all(np.array_equal(one, other) for one, other in zip(kept, again, strict=True))


def test_what_clients_have_in_common_is_signal() -> None:
    random = np.random.default_rng(0)
    common, own = random.standard_normal(4000), random.standard_normal((10, 4000))
    weights = np.full(10, 0.1)
    assert shared_variance(common + np.sqrt(10) * own, weights) == pytest.approx(0.5, abs=0.05)
    assert shared_variance(np.tile(common, (10, 1)), weights) == pytest.approx(1)
    assert shared_variance(own, weights) == pytest.approx(0, abs=0.1)


def tuned_at(prices: Prices, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> Tuned:
    monkeypatch.setattr(tuning, "prices_of", lambda *_task: prices)
    return tune(plan)


def test_cheaper_directions_get_a_trial_that_judges_them(tiny: MakePlan, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = tiny("run.runtime=torch", "rounds=4", "federation.batch=16")
    alike, cheaper = (tuned_at(prices, plan, monkeypatch) for prices in (ALIKE, {"dense": DENSE, "stages": STAGES}))
    assert alike.prices == {"dense": 1e-3, "stages": 9e-4}
    (head,) = alike.advice
    assert 'clearly lower: set probe.head = "exact", for 2,600 bytes more a client and round' in head
    (advice, _) = cheaper.advice
    assert "along stage directions a scalar takes 0.1 ms of CPU instead of 1; held-out loss after 4 rounds" in advice
    own = advice.partition("against ")[2].partition(",")[0]
    assert f"{own} at" in cheaper.reasons[1].why
    assert advice in cheaper.to_toml()
    assert (cheaper.plan, cheaper.forwards) == (alike.plan, alike.forwards)
    assert tuned_at(ALIKE, tiny("run.runtime=torch", "rounds=1", "probe.head=exact"), monkeypatch).advice == ()
    private = tiny("rounds=1", "privacy.noise=0.1", "privacy.clip=5.0", "federation.weighting=uniform")
    *_, advice = tuned_at({"dense": DENSE, "stages": STAGES}, private, monkeypatch).advice
    assert "no trial, because the clipping norm is for the plan's own" in advice


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (0.5, "clearly lower: set it"),
        (1.0, "no clear difference: set it"),
        (1.5, "clearly higher: the plan keeps its own"),
        (np.inf, "clearly higher: the plan keeps its own"),
    ],
)
def test_the_verdict_is_on_the_losses(loss: float, said: str) -> None:
    scatter = np.linspace(-0.01, 0.01, 16)
    # A verdict never looks at the trial itself.
    cheap, own = (Runner(0.1, None, losses) for losses in (loss + scatter, 1.0 - scatter))  # type: ignore[arg-type]
    assert verdict(cheap, own, "set it").startswith(said)


@pytest.mark.parametrize(
    ("settings", "splits"),
    [
        (["probe.k=40", "federation.batch=32"], [(160, 8), (10, 128)]),
        (["probe.k=40", "federation.batch=16"], [(10, 64)]),  # a client's policy refuses fewer than 8 samples
        (["probe.k=16", "federation.batch=0"], []),
        (["probe.k=40", 'federation.level="epoch"'], []),
    ],
)
def test_splits_keep_the_rows(tiny: MakePlan, settings: list[str], splits: list[tuple[int, int]]) -> None:
    assert splits_of(Ground(tiny(*settings), from_folder(), Spent()).task) == splits
