"""`tune`: the same advice from any σ and rate, with reasons, and plans that it cannot help."""

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
from baffle.tune.split import splits_of
from baffle.tune.trial import Ground, Spent, shared_variance, split_off
from baffle.tune.tuning import SIGMAS_TO_TRY, Tuned, tune
from tests.conftest import TINY

ROUNDS = "rounds=20"


@cache
def tuned(*settings: str) -> Tuned:
    return tune(parse(TINY, [ROUNDS, "probe.k=16", *settings]))


@pytest.mark.parametrize(
    "wrong", ["probe.sigma=0.1", "probe.sigma=1e-5", "update.rate=1.0", "update.rate=1e-4", "update.rate=1e4"]
)
def test_the_advice_does_not_depend_on_sigma_and_rate(wrong: str) -> None:
    right, other = tuned(), tuned(wrong)
    assert other.plan == right.plan
    assert (other.forwards, other.trial_rounds) == (right.forwards, right.trial_rounds)


def test_the_same_plan_gets_the_same_advice_with_any_number_of_workers() -> None:
    assert tuned("run.workers=1").plan.update == tuned("run.workers=3").plan.update


def test_another_seed_is_another_trial() -> None:
    assert tuned("seed=5").reasons != tuned().reasons


def test_every_setting_has_a_reason_and_nothing_else_changes() -> None:
    advice = tuned("update.rate=1.0")
    assert [reason.key for reason in advice.reasons] == [
        "probe.sigma",
        "update.rate",
        "probe.k",
        "federation.batch",
    ]
    sigma, rate, k, batch = (reason.after for reason in advice.reasons)
    assert advice.plan == parse(
        TINY,
        [ROUNDS, f"probe.k={k}", f"probe.sigma={sigma}", f"update.rate={rate}", f"federation.batch={batch}"],
    )
    assert advice.forwards > 0
    assert advice.share == pytest.approx(advice.forwards / (20 * 3 * 17), rel=1e-6)
    assert 0 <= (advice.alignment_measured or 0) <= advice.alignment_predicted


def test_the_plan_is_written_with_its_reasons_as_comments() -> None:
    text = tuned("update.rate=1.0").to_toml()
    assert "# update.rate = " in text
    assert "(was 1): held-out loss" in text
    assert parse(text) == tuned("update.rate=1.0").plan
    assert tomllib.loads(text)["name"] == "tiny"


@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
def test_rates_of_other_optimizers_are_found_too(tiny: Callable[..., Plan], tmp_path: Path, optimizer: str) -> None:
    plan = tune(tiny(ROUNDS, "probe.k=16", f"update.optimizer={optimizer}", "update.rate=1e-5")).plan
    before = simulate(tiny(ROUNDS, "probe.k=16", f"update.optimizer={optimizer}", "update.rate=1e-5"), tmp_path / "1")
    assert simulate(plan, tmp_path / "2")["train_loss"] < before["train_loss"] - 0.1


def test_at_epoch_level_the_rate_is_tuned_and_the_split_stays(tiny: Callable[..., Plan]) -> None:
    advice = tune(tiny("rounds=6", 'federation.level="epoch"', "federation.batch=200", "update.rate=10.0"))
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

def rough(shape, classes):
    return Own(shape, classes, lambda outputs: outputs + 5 * (1e6 * outputs).sin())

def signs(shape, classes):
    return Own(shape, classes, lambda outputs: 1e-9 * outputs.sign())
"""


def advice_on(folder: Path, plan: Plan) -> Tuned:
    (folder / "own_models.py").write_text(OWN_MODELS)
    with chdir(folder):
        return tune(plan)


@pytest.mark.parametrize("model", ["stepped", "rough"])
def test_a_loss_without_derivatives_gets_a_sigma_that_sees_beyond_its_grain(
    tiny: Callable[..., Plan], tmp_path: Path, model: str
) -> None:
    plan = tiny(ROUNDS, "probe.k=16", f'task.model={{name="custom", factory="own_models:{model}"}}')
    assert advice_on(tmp_path, plan).plan.probe.sigma >= 0.01


def test_where_no_two_steps_agree_trials_choose_sigma(tiny: Callable[..., Plan], tmp_path: Path) -> None:
    plan = tiny(ROUNDS, "probe.k=16", 'task.model={name="custom", factory="own_models:signs"}')
    advice = advice_on(tmp_path, plan)
    assert "short trials decided" in advice.reasons[0].why
    assert advice.plan.probe.sigma in SIGMAS_TO_TRY


def test_backpropagation_is_refused(tiny: Callable[..., Plan]) -> None:
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


def test_splits_keep_the_rows_and_respect_a_clients_policy(tiny: Callable[..., Plan]) -> None:
    def splits(*settings: str) -> list[tuple[int, int]]:
        return splits_of(Ground(tiny(*settings), None, Spent()).task)

    assert splits("probe.k=40", "federation.batch=32") == [(160, 8), (10, 128)]
    assert splits("probe.k=40", "federation.batch=16") == [(10, 64)]
    assert splits("probe.k=16", "federation.batch=0") == []
    assert splits("probe.k=40", 'federation.level="epoch"') == []


def test_what_clients_have_in_common_is_signal() -> None:
    random = np.random.default_rng(0)
    common, own = random.standard_normal(4000), random.standard_normal((10, 4000))
    weights = np.full(10, 0.1)
    assert shared_variance(common + np.sqrt(10) * own, weights) == pytest.approx(0.5, abs=0.05)
    assert shared_variance(np.tile(common, (10, 1)), weights) == pytest.approx(1)
    assert shared_variance(own, weights) == pytest.approx(0, abs=0.1)
