"""Plans whose σ or ring is too imprecise are refused, borderline plans get advice, and others pass silently."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from baffle.errors import PlanError
from baffle.plan import Plan, load
from baffle.simulation import simulate
from baffle.task import precision
from baffle.task.load import Task, load_task
from baffle.task.precision import Precision, judge, require_precision
from baffle.trajectory import trajectory_of
from tests.support.own_tasks import HERE

ROUNDED = "task.model={name='lenet', channels=[2, 2], head='flatten'}"
"""A model whose scalars are differences of float32 forward passes, unlike those of a linear model."""


def measure(task: Task) -> Precision:
    measured = precision.measure(task)
    assert measured is not None
    return measured


def test_the_presets_are_fine(tiny: Callable[..., Plan]) -> None:
    assert require_precision(load_task(load("digits"))) == []
    assert require_precision(load_task(tiny())) == []


@pytest.mark.parametrize("scheme", ["forward", "central"])
def test_a_step_below_the_precision_of_the_loss_is_refused(tiny: Callable[..., Plan], scheme: str) -> None:
    with pytest.raises(PlanError, match=r"probe\.sigma: 1e-09 is below the precision.*use at least \S+") as refused:
        require_precision(load_task(tiny(ROUNDED, "probe.sigma=1e-9", f"probe.scheme={scheme}")))
    wanted = float(str(refused.value).rsplit(" ", 1)[1])
    assert require_precision(load_task(tiny(ROUNDED, f"probe.sigma={wanted}", f"probe.scheme={scheme}"))) == []


@pytest.mark.parametrize("init", ["", "numpy"], ids=["against float64", "over steps"])
def test_a_step_that_measures_curvature_is_named_with_a_smaller_one(tiny: Callable[..., Plan], init: str) -> None:
    settings = (ROUNDED, f"task.init={init}")
    (advice,) = require_precision(load_task(tiny(*settings, "probe.sigma=10.0")))
    assert advice.startswith("probe.sigma = 10 is too large: the loss curves")
    most = float(advice.rsplit(" ", 1)[1])
    assert require_precision(load_task(tiny(*settings, f"probe.sigma={most}"))) == []


def test_without_float64_rounding_is_found_by_other_steps(tiny: Callable[..., Plan]) -> None:
    settings = (ROUNDED, "task.init=numpy")
    with pytest.raises(PlanError, match=r"probe\.sigma: 1e-09 is below the precision.*use at least \S+") as refused:
        require_precision(load_task(tiny(*settings, "probe.sigma=1e-9")))
    wanted = float(str(refused.value).rsplit(" ", 1)[1])
    assert require_precision(load_task(tiny(*settings, f"probe.sigma={wanted}"))) == []


def test_a_small_step_is_warned_about_with_a_better_one(tiny: Callable[..., Plan], tmp_path: Path) -> None:
    warnings: list[str] = []
    simulate(tiny(ROUNDED, "probe.sigma=3e-7", "secure.mode=on"), tmp_path / "run", warn=warnings.append)
    (advice,) = warnings
    assert advice.startswith("probe.sigma = 3e-07 is small for float32 losses")


def test_noise_falls_as_the_step_grows(tiny: Callable[..., Plan]) -> None:
    noise = [measure(load_task(tiny(ROUNDED, f"probe.sigma={sigma}"))).noise for sigma in (1e-8, 1e-6, 1e-4)]
    assert noise[0] > 10 * noise[1] > 100 * noise[2]


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@pytest.mark.parametrize("scheme", ["forward", "central"])
def test_half_precision_needs_a_larger_step_and_the_message_says_which(
    tiny: Callable[..., Plan], precision: str, scheme: str
) -> None:
    settings = (ROUNDED, f"probe.precision={precision}", f"probe.scheme={scheme}")
    assert measure(load_task(tiny(ROUNDED, "probe.sigma=1e-6", f"probe.scheme={scheme}"))).noise < 0.5
    with pytest.raises(PlanError, match=r"probe\.sigma: 1e-06 is below the precision.*use at least \S+") as refused:
        require_precision(load_task(tiny(*settings, "probe.sigma=1e-6")))
    wanted = float(str(refused.value).rsplit(" ", 1)[1])
    assert wanted > 1e-4
    assert require_precision(load_task(tiny(*settings, f"probe.sigma={wanted}"))) == []


def test_if_no_step_is_large_enough_the_message_asks_for_another_precision(tiny: Callable[..., Plan]) -> None:
    task = load_task(tiny(ROUNDED, "probe.precision=bfloat16"))
    hopeless = replace(measure(task), noise=0.9, sigma_wanted=float("inf"))
    with pytest.raises(PlanError, match=r'no σ up to 0\.1 would do; set probe\.precision = "float32"'):
        judge(task, hopeless)


def test_a_ring_too_coarse_is_refused(tiny: Callable[..., Plan]) -> None:
    with pytest.raises(PlanError, match=r"ring\.d_max: 1e\+09 leaves the ring too coarse.*lower ring\.d_max"):
        require_precision(load_task(tiny("ring.d_max=1e9")))


def test_a_step_of_the_ring_is_measured_as_a_share_of_a_scalar(tiny: Callable[..., Plan]) -> None:
    task = load_task(tiny())
    measured = measure(task)
    step = 1 / (trajectory_of(task.plan, 650).ring.scale * 479)
    assert measured.quantum * measured.typical == pytest.approx(step)
    uniform = load_task(tiny("federation.weighting=uniform", "ring.n_max=100"))
    measured = measure(uniform)
    assert measured.quantum * measured.typical == pytest.approx(1 / trajectory_of(uniform.plan, 650).ring.scale)


def test_a_bound_that_will_clip_is_warned_about(tiny: Callable[..., Plan]) -> None:
    (advice,) = require_precision(load_task(tiny("ring.d_max=1")))
    assert advice.startswith("ring.d_max = 1 will clip")


def test_backpropagation_needs_no_step(tiny: Callable[..., Plan]) -> None:
    assert require_precision(load_task(tiny('estimator="backprop"', "probe.sigma=1e-9"))) == []


def test_at_epoch_level_the_ring_is_not_measured_against_scalars(tiny: Callable[..., Plan]) -> None:
    task = load_task(tiny(ROUNDED, 'federation.level="epoch"'))
    assert measure(task).quantum == 0
    with pytest.raises(PlanError, match=r"probe\.sigma"):
        require_precision(load_task(tiny(ROUNDED, 'federation.level="epoch"', "probe.sigma=1e-9")))


def test_a_loss_in_steps_needs_a_sigma_that_changes_it(tiny: Callable[..., Plan]) -> None:
    settings = (f'task.data="{HERE}:blobs"', f'task.loss="{HERE}:share_of_errors"')
    with pytest.raises(PlanError, match=r"^probe\.sigma: 1e-06 is too small: none of 8 probes changed the loss"):
        require_precision(load_task(tiny(*settings, "probe.sigma=1e-6")))
    assert require_precision(load_task(tiny(*settings, "probe.sigma=0.3"))) == []
