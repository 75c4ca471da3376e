"""What a few probes say: which steps measure derivatives, which plans are too imprecise, how unlike layers are."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from exact_contrast import exact_contrast
from hypothesis import given, settings, strategies as st
from torch import nn

from baffle.core.arrays import F32
from baffle.core.directions import DISTRIBUTIONS, Directions, dense
from baffle.core.probe import SCHEMES, Loss
from baffle.errors import PlanError
from baffle.measuring.costs import costs
from baffle.measuring.precision import (
    TOLERANCE,
    Window,
    find_window,
    judge,
    judge_contrast,
    measure,
    measure_contrast,
    require_precision,
)
from baffle.plan import Plan, load
from baffle.task.load import Task, load_task
from baffle.trajectory import trajectory_of
from tests.support.own_tasks import HERE

MakePlan = Callable[..., Plan]


ROUNDED = "task.model={name='lenet', channels=[2, 2], head='flatten'}"
"""A model whose scalars are differences of float32 forward passes, unlike those of a linear model."""


@pytest.mark.parametrize(
    ("sigma", "settings"),
    [
        ("1e-09", ["probe.scheme=forward"]),
        ("1e-09", ["probe.scheme=central"]),
        ("1e-09", ["task.init=numpy"]),  # without float64
        ("1e-09", ['federation.level="epoch"']),
        ("1e-06", ["probe.precision=bfloat16"]),
        ("1e-06", ["probe.precision=float16", "probe.scheme=central"]),
    ],
)
def test_a_step_below_the_precision_of_the_loss_is_refused(tiny: MakePlan, sigma: str, settings: list[str]) -> None:
    with pytest.raises(PlanError, match=rf"probe\.sigma: {sigma} is below the precision.*use at least \S+") as refused:
        require_precision(load_task(tiny(ROUNDED, f"probe.sigma={sigma}", *settings)))
    wanted = float(str(refused.value).rsplit(" ", 1)[1])
    assert wanted > (1e-8 if sigma == "1e-09" else 1e-4)
    assert require_precision(load_task(tiny(ROUNDED, f"probe.sigma={wanted}", *settings))) == []


@pytest.mark.parametrize("init", ["", "numpy"], ids=["against float64", "over steps"])
def test_a_step_that_measures_curvature_is_named_with_a_smaller_one(tiny: MakePlan, init: str) -> None:
    settings = (ROUNDED, f"task.init={init}")
    (advice,) = require_precision(load_task(tiny(*settings, "probe.sigma=10.0")))
    assert advice.startswith("probe.sigma = 10 is too large: the loss curves")
    most = float(advice.rsplit(" ", 1)[1])
    assert require_precision(load_task(tiny(*settings, f"probe.sigma={most}"))) == []


def test_if_no_step_is_large_enough_the_message_asks_for_another_precision(tiny: MakePlan) -> None:
    task = load_task(tiny(ROUNDED, "probe.precision=bfloat16"))
    hopeless = replace(measure(task), noise=0.9, sigma_wanted=float("inf"))
    with pytest.raises(PlanError, match=r'no σ up to 0\.1 would do; set probe\.precision = "float32"'):
        judge(task, hopeless)


def test_a_ring_too_coarse_is_refused_and_one_that_will_clip_warned_about(tiny: MakePlan) -> None:
    assert require_precision(load_task(load("digits"))) == require_precision(load_task(tiny())) == []
    (advice,) = require_precision(load_task(tiny("ring.d_max=1")))
    assert advice.startswith("ring.d_max = 1 will clip")
    assert require_precision(load_task(tiny('estimator="backprop"', "probe.sigma=1e-9"))) == []
    with pytest.raises(PlanError, match=r"ring\.d_max: 1e\+09 leaves the ring too coarse.*lower ring\.d_max"):
        require_precision(load_task(tiny("ring.d_max=1e9")))


def test_a_step_of_the_ring_is_measured_as_a_share_of_a_scalar(tiny: MakePlan) -> None:
    task = load_task(tiny())
    measured = measure(task)
    step = 1 / (trajectory_of(task.plan, 650).ring.scale * 479)
    assert measured.quantum * measured.typical == pytest.approx(step)
    uniform = load_task(tiny("federation.weighting=uniform", "ring.n_max=100"))
    measured = measure(uniform)
    assert measured.quantum * measured.typical == pytest.approx(1 / trajectory_of(uniform.plan, 650).ring.scale)
    assert measure(load_task(tiny(ROUNDED, 'federation.level="epoch"'))).quantum == 0  # no scalars are sent


def test_a_loss_in_steps_needs_a_sigma_that_changes_it(tiny: MakePlan) -> None:
    settings = (f'task.data="{HERE}:blobs"', f'task.loss="{HERE}:share_of_errors"')
    with pytest.raises(PlanError, match=r"^probe\.sigma: 1e-06 is too small: none of 8 probes changed the loss"):
        require_precision(load_task(tiny(*settings, "probe.sigma=1e-6")))
    assert require_precision(load_task(tiny(*settings, "probe.sigma=0.3"))) == []


N = 50
WEIGHTS = np.linspace(-1, 1, N).astype(np.float32)
DIRECTIONS = Directions(bytes(32), DISTRIBUTIONS["rademacher"])


def window_of(loss: Loss, scheme: str = "forward") -> Window:
    return find_window(loss, WEIGHTS, SCHEMES[scheme], DIRECTIONS, dense(N, 16))


def bowl(curvature: float, grain: float = 0.0) -> Loss:
    """A slope of 1 in every weight, this curvature, and losses that are rounded to multiples of `grain`."""

    def loss(weights: F32) -> float:
        move = weights.astype(np.float64) - WEIGHTS
        exact = float(np.sum(move) + curvature / 2 * np.sum(move**2))
        return round(exact / grain) * grain if grain else exact

    return loss


@settings(max_examples=30)
@given(st.floats(-2, 2))
def test_ten_times_the_curvature_means_a_tenth_of_the_step(exponent: float) -> None:
    """Two steps fewer, or one more or less where the bound lies next to a step."""
    low, high = window_of(bowl(10**exponent)), window_of(bowl(10 ** (exponent + 1)))
    assert 3 <= low.high / high.high <= 32


@settings(max_examples=30)
@given(st.floats(-6, -3))
def test_ten_times_the_grain_means_ten_times_the_least_step(exponent: float) -> None:
    fine, coarse = window_of(bowl(0.0, 10**exponent)), window_of(bowl(0.0, 10 ** (exponent + 1)))
    assert 3 <= coarse.low / fine.low <= 32
    assert coarse.high == fine.high == 1


def test_outside_the_window_scalars_are_off_and_inside_they_are_not() -> None:
    window = window_of(bowl(1.0, 1e-6))
    for sigma, error in window.errors.items():
        assert (error <= TOLERANCE) == (window.low <= sigma <= window.high)
    assert window.low < window.middle < window.high


def test_central_differences_see_no_even_curvature() -> None:
    assert window_of(bowl(100.0), "central").high == 1
    assert window_of(bowl(100.0), "forward").high < 0.01


@pytest.mark.parametrize(
    "loss",
    [lambda weights: float(np.count_nonzero(weights > WEIGHTS + 0.5)), lambda _weights: 1.0, lambda _weights: np.nan],
    ids=["a count", "a constant", "not a number"],
)
def test_a_loss_without_derivatives_has_no_window(loss: Callable[[F32], float]) -> None:
    assert not window_of(loss).smooth


def test_two_windows_meet_where_both_allow() -> None:
    both = Window(1e-6, 1e-3, 1.0).meet(Window(1e-5, 1e-2, 2.0))
    assert (both.low, both.high, both.typical) == (1e-5, 1e-3, 2.0)
    apart = Window(1e-6, 1e-5, 1.0).meet(Window(1e-3, 1e-2, 2.0))  # the gap between them
    assert (apart.low, apart.high) == (1e-5, 1e-3)


OWN_NET = 'task.model={{name="custom", factory="{}:{}"}}'


def deep() -> nn.Module:
    """Eight layers without normalisation: gradients fade towards the first."""
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(64, 24), nn.ReLU()]
    for _ in range(6):
        layers += [nn.Linear(24, 24), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(24, 10))


def alike() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.LayerNorm(32, elementwise_affine=False), nn.Linear(32, 10))


def begins_at_zero() -> nn.Module:
    """A last layer of zeros, behind which nothing has a gradient yet."""
    module = deep()
    nn.init.zeros_(module.get_submodule("15").weight)  # type: ignore[arg-type]
    return module


def _task(tiny: MakePlan, factory: str, *settings: str) -> Task:
    return load_task(tiny(OWN_NET.format(__name__, factory), *settings))


@pytest.mark.parametrize("factory", ["deep", "alike"])
@pytest.mark.parametrize("seed", [0, 1])
def test_probes_find_what_backpropagation_finds(tiny: MakePlan, factory: str, seed: int) -> None:
    task = _task(tiny, factory, f"seed={seed}", "probe.scheme=central")
    found, exact = measure_contrast(task), exact_contrast(task)
    assert found is not None
    assert found.layers == exact.layers
    assert exact.factor / 2 < found.factor < 2 * exact.factor
    assert exact.noise / 2 < found.noise < 2 * exact.noise


def test_dense_directions_are_advised_against_where_layers_are_unlike(tiny: MakePlan) -> None:
    predicted = costs(_task(tiny, "deep"))
    found, alike = predicted.contrast, _task(tiny, "alike")
    assert found is not None
    assert found.noise > 5
    assert (
        f"the gradients of the model's layers differ by a factor of {found.factor:.2g}, and dense directions have "
        f'{found.noise:.2g} times the noise of directions that touch one layer each; set probe.supports = "layers"'
    ) in predicted.advice
    assert (contrast := measure_contrast(alike)) is not None
    assert judge_contrast(alike, contrast) == []
    followed = _task(tiny, "deep", "probe.supports=layers", "probe.k=8")
    assert judge_contrast(followed, found) == []


def test_layers_without_a_gradient_are_left_out(tiny: MakePlan) -> None:
    """All but the last have none at first, so there is nothing to compare, as in a single layer."""
    assert measure_contrast(_task(tiny, "begins_at_zero")) is None
    assert measure_contrast(load_task(tiny())) is None
    assert measure_contrast(_task(tiny, "deep", "estimator=backprop")) is None


def test_of_many_layers_some_are_probed(tiny: MakePlan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baffle.measuring.precision.MOST_LAYERS", 3)
    found = measure_contrast(_task(tiny, "deep"))
    assert found is not None
    assert found.layers == 8
