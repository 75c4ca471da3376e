"""Directions that cost less than a plan's own: tried, judged, told."""

from collections.abc import Callable

import numpy as np
import pytest

from baffle.plan import Plan
from baffle.task.choice import Price, Prices
from baffle.tune import tuning
from baffle.tune.cheaper import verdict
from baffle.tune.race import Runner
from baffle.tune.tuning import Tuned, tune

LENET = ('task.model={name="lenet", channels=[2, 3]}', "run.runtime=torch", "rounds=4", "probe.k=24")
DENSE = {"supports": "dense", "distribution": "rademacher"}
UNITS = {"supports": "units", "distribution": "rademacher"}


def tuned_at(prices: Prices, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> Tuned:
    monkeypatch.setattr(tuning, "prices_of", lambda *_task, **_given: prices)
    return tune(plan)


def test_cheaper_directions_get_a_trial_that_judges_them(
    tiny: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    alike = tuned_at({"dense": Price(1e-3, DENSE), "units": Price(9e-4, UNITS)}, tiny(*LENET), monkeypatch)
    assert alike.prices == {"dense": 1e-3, "units": 9e-4}
    assert alike.advice == ()
    cheaper = tuned_at({"dense": Price(1e-3, DENSE), "units": Price(1e-4, UNITS)}, tiny(*LENET), monkeypatch)
    (advice,) = cheaper.advice
    assert "along unit directions a scalar takes 0.1 ms of CPU instead of 1; held-out loss after 4 rounds" in advice
    own = advice.partition("against ")[2].partition(",")[0]
    assert f"{own} at" in cheaper.reasons[1].why
    assert advice in cheaper.to_toml()
    assert (cheaper.plan, cheaper.forwards) == (alike.plan, alike.forwards)


def test_what_tune_measures_names_every_kind(tiny: Callable[..., Plan]) -> None:
    assert tune(tiny(*LENET)).prices.keys() == {"dense", "layers", "outer", "stages", "units"}


def test_a_private_plan_gets_no_trial_of_other_directions(
    tiny: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    private = tiny(*LENET, "privacy.noise=0.1", "privacy.clip=5.0", "federation.weighting=uniform")
    (advice,) = tuned_at({"dense": Price(1e-3, DENSE), "units": Price(1e-4, UNITS)}, private, monkeypatch).advice
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
