"""Which plans are the same as a run's, and in which words the others differ."""

from collections.abc import Callable

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from baffle.errors import PlanError
from baffle.network.same_plan import differences
from baffle.plan import Plan, change, load

SETTINGS = (
    "name=other",
    "rounds=7",
    "run.workers=3",
    "seed=9",
    "estimator=backprop",
    "task.augment=true",
    "task.model.norm=group",
    'task.model={name="softmax"}',
    "federation.batch=5",
    "federation.tiers=[{k=2, share=0.5}]",
    "probe.k=21",
    "probe.sigma=0.5",
    "update.betas=[0.5, 0.5]",
    "ring.n_max=5",
    "secure.floor=4",
    "secure.mode=malicious-server",
    "secure.groups=2",
)

SETTLED = change(load("digits"), ["ring.n_max=9", "probe.micro_batch=8", "federation.tiers=[{k=1, share=0.5}]"])


@given(st.lists(st.sampled_from(SETTINGS), max_size=4, unique_by=lambda setting: setting.partition("=")[0][:10]))
def test_plans_are_the_same_if_their_trajectory_and_their_secure_settings_are(settings: list[str]) -> None:
    run = change(load("digits"), ["ring.n_max=9", "probe.micro_batch=8"])
    try:
        other = change(run, settings)
    except PlanError:
        reject()  # these settings do not go together
    same = other.trajectory_digest() == run.trajectory_digest() and other.secure == run.secure
    assert (differences(other, run) == "") is same


def test_a_plan_may_leave_the_layers_to_the_run() -> None:
    given = change(load("digits"), ["update.moments=layers"])
    settled = change(given, ["update.layers=[[0, 5994, 0, 0]]", "ring.n_max=9", "probe.micro_batch=8"])
    assert differences(given, settled) == ""


def test_a_plan_may_leave_the_shapes_of_tensors_to_the_run() -> None:
    given = change(load("digits"), ["probe.distribution=outer"])
    settled = change(given, ["probe.shapes=[[5994]]", "ring.n_max=9", "probe.micro_batch=8"])
    assert differences(given, settled) == ""
    other = change(settled, ["probe.shapes=[[2, 2997]]"])
    assert differences(other, settled) == "probe.shapes is [[5994]] there and [[2,2997]] here"


def test_a_plan_may_leave_open_what_a_run_settles() -> None:
    assert differences(load("digits"), SETTLED) == ""
    assert differences(SETTLED, load("digits")).startswith("federation.tiers is [] there and [{")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["probe.k=50"], "probe.k is 20 there and 50 here"),
        (["task.model={name='softmax'}"], 'task.model.name is "lenet" there and "softmax" here'),
        (["secure.mode=malicious-server"], 'secure.mode is "on" there and "malicious-server" here'),
        (
            ["seed=1", "probe.k=50", "update.clip=1", "update.ema=0.5", "secure.floor=4"],
            "probe.k is 20 there and 50 here, secure.floor is 3 there and 4 here, seed is 0 there and 1 here, and 2 "
            "more",
        ),
    ],
)
def test_the_first_few_differences_are_named_with_both_values(settings: list[str], words: str) -> None:
    run = change(SETTLED, ["probe.k=20"])
    assert differences(change(run, settings), run) == words


def test_a_long_value_is_cut(tiny: Callable[..., Plan]) -> None:
    said = differences(tiny(f'task.data="{"x" * 5000}:f"'), tiny())
    assert said.startswith('task.data is "digits" there and "xxx')
    assert len(said) < 200
