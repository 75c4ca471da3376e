"""[privacy] in plans: the noise and ε that follow, and settings that would void them."""

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from baffle.errors import PlanError
from baffle.plan import Plan, change, parse
from baffle.plan.privacy import certain_sharers, epsilon_of, least_survivors, private_ring, with_noise

N = 650
PRIVATE = ("federation.weighting=uniform", "secure.mode=on", "privacy.clip=2.0", "rounds=200")
GROUPED = ("secure.mode=malicious-server", "secure.groups=2")
HUNDRED = ("federation.clients=100", "secure.floor=90", "probe.k=20")

MakePlan = Callable[..., Plan]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("federation.weighting=samples",), 'federation.weighting: a private run needs "uniform"'),
        (("federation.level=epoch",), 'federation.level: a private run needs "batch"'),
        (("federation.seeds=own",), 'federation.seeds: a private run needs "shared"'),
        (("secure.mode=off", "secure.floor=4"), "secure.floor: a private sum needs 4 clients for its noise, but has 3"),
        (("privacy.sharers=4",), "privacy.sharers: expected at most 3"),
        (("privacy.noise=0",), "privacy.clip without noise is no privacy"),
        (("privacy.noise=0", "privacy.clip=0", "privacy.sharers=2"), "privacy.sharers without noise is no privacy"),
        (("privacy.noise=-1",), "privacy.noise: expected float >= 0"),
        (("privacy.noise=1e-300",), "privacy.noise: expected at least 0.0001"),
        (("privacy.delta=0",), "privacy.delta: expected float > 0"),
        (("privacy.delta=1",), "privacy.delta: expected float < 1"),
        (("privacy.noize=1",), "unknown key privacy.noize"),
    ],
)
def test_what_would_void_privacy_is_refused(tiny: MakePlan, settings: tuple[str, ...], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        tiny(*PRIVATE, "privacy.noise=1.0", *settings)


def test_a_plan_without_privacy_has_the_digests_that_it_had(tiny: MakePlan) -> None:
    """A plan of version 0.1, whose TOML knows no [privacy]."""
    old = "\n".join(line for line in tiny().to_toml().split("[privacy]")[0].splitlines())
    assert parse(old + "\n" + "[run]" + tiny().to_toml().split("[run]")[1]) == tiny()
    assert tiny().digest() == change(tiny(), ["privacy.delta=1e-5"]).digest()
    assert tiny().trajectory_digest() == change(tiny(), ["privacy.delta=1e-6"]).trajectory_digest()


@pytest.mark.parametrize(
    ("settings", "survivors", "sharers"),
    [
        (("secure.floor=90",), 90, 90),
        (("secure.floor=3", "secure.threshold=60"), 60, 60),
        (("secure.floor=90", "secure.mode=off"), 90, 90),
        (("secure.floor=3", "secure.mode=malicious-server"), 67, 67 - 33),
        (("secure.floor=90", "secure.mode=malicious-server"), 90, 90 - 33),
        (("secure.floor=3", "secure.mode=malicious-server", "secure.groups=3"), 23, 12),
        (("secure.floor=20", "secure.groups=3"), 20, 20),
        (("secure.floor=3", "secure.mode=malicious-server", "secure.liars=1"), 51, 51 - 1),
        (("federation.clients=10", "secure.floor=3", *GROUPED, "secure.liars=1"), 4, 3),
        (("federation.clients=3", "secure.floor=3", "secure.mode=malicious-server"), 3, 3),  # fewer than a third lie
    ],
)
def test_noise_is_counted_on_from_the_fewest_survivors_without_the_liars(
    tiny: MakePlan, settings: tuple[str, ...], survivors: int, sharers: int
) -> None:
    plan = tiny(*PRIVATE, *HUNDRED, "privacy.noise=1.0", *settings)
    assert (least_survivors(plan), certain_sharers(plan)) == (survivors, sharers)
    assert with_noise(plan, N).privacy.sharers == sharers


@given(st.integers(2, 60), st.integers(1, 10), st.integers(2, 60), st.sampled_from(["on", "malicious-server", "off"]))
def test_somebody_is_always_certain_to_add_noise(clients: int, groups: int, floor: int, mode: str) -> None:
    settings = (
        f"federation.clients={clients}",
        f"secure.groups={groups}",
        f"secure.floor={floor}",
        f"secure.mode={mode}",
    )
    try:
        plan = parse("", [*PRIVATE, "privacy.noise=1.0", *settings])
    except PlanError:
        return
    smallest, largest = plan.group_sizes
    assert 1 <= certain_sharers(plan) <= least_survivors(plan) <= smallest
    if mode == "malicious-server":  # whatever the group, its survivors without the most liars are no fewer
        for m in (smallest, largest):
            assert certain_sharers(plan) <= max(floor, 2 * m // 3 + 1) - (math.ceil(m / 3) - 1)


def test_the_plan_in_the_docs_is_private() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "privacy.md"
    [text] = re.findall(r"^```toml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    plan = parse(text)
    assert plan.privacy.on
    assert (plan.privacy.epsilon, plan.secure.floor) == (8, 90)


def test_a_target_gives_the_noise_that_just_keeps_it(tiny: MakePlan) -> None:
    plan = with_noise(tiny(*PRIVATE, *HUNDRED, "privacy.epsilon=8"), N)
    assert 8.9 < plan.privacy.noise < 9.8
    assert 7.99 < epsilon_of(plan, N, 200) <= 8
    assert epsilon_of(change(plan, [f"privacy.noise={plan.privacy.noise - 1e-3}"]), N, 200) > 8
    assert with_noise(plan, N) == plan  # settled once, it stays
    assert epsilon_of(plan, N, 0) == 0


def test_more_noise_more_rounds_and_the_ring(tiny: MakePlan) -> None:
    plan = with_noise(tiny(*PRIVATE, *HUNDRED, "privacy.noise=9"), N)
    ring = private_ring(plan, N)
    assert (ring.clients, ring.norm, ring.noise, ring.sharers, ring.length) == (100, 2.0, 9.0, 90, 20)
    assert private_ring(change(plan, ['estimator="backprop"']), N).length == N


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["epsilon=8", "noise=5"], r"200 rounds with noise 5 come to ε = 1\d\.\d+ at δ = 1e-05, more than 8"),
        (["noise=1000000", "sharers=1"], "leaves the ring too coarse for 20 values"),
        (["epsilon=1e-9"], r"privacy.epsilon: no noise|leaves the ring too coarse"),
        (["epsilon=1e-6"], r"privacy.epsilon: no noise|leaves the ring too coarse"),
        (["noise=9", "clip=0"], "privacy.clip is 0"),
    ],
)
def test_noise_that_cannot_keep_its_promise_is_refused(tiny: MakePlan, settings: list[str], words: str) -> None:
    plan = tiny(*PRIVATE, *HUNDRED, *(f"privacy.{setting}" for setting in settings))
    with pytest.raises(PlanError, match=words):
        private_ring(with_noise(plan, N), N)


@pytest.mark.parametrize("name", ["noise", "sharers"])
def test_a_ring_needs_what_a_run_fills_in(tiny: MakePlan, name: str) -> None:
    plan = tiny(*PRIVATE, *HUNDRED, "privacy.noise=9", "privacy.sharers=90", "privacy.epsilon=100")
    with pytest.raises(PlanError, match=f"privacy.{name} is 0"):
        private_ring(change(plan, [f"privacy.{name}=0"]), N)
