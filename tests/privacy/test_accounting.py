"""The accountant: against dp-accounting, against divergences summed directly, and monotone in all that it takes. A
client's ledger adds up, and a budget is never exceeded."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from baffle.errors import RefusalError
from baffle.privacy.accounting import GRID, Budget, Charge, Ledger, Release, bound_l1, epsilon, noise_for, rdp, spent
from tests.support.skellam_law import skellam_logs

REFERENCE: dict[str, list[dict[str, Any]]] = json.loads(Path(__file__).with_name("reference.json").read_text())

FINE = {"delta_2": 2**18, "dimension": 1000}
"""A bound of so many units that integers are nearly real numbers."""


def divergence(mu: float, shift: int, alpha: int) -> float:
    """The Rényi divergence between Skellam noise and the same moved by `shift`, summed over all that matters."""
    reach = int(mu) + 40 * alpha * shift + 60 + int(14 * math.sqrt(mu))
    logs = skellam_logs(mu, reach + shift)
    x = np.arange(-reach, reach + 1)
    terms = alpha * logs[np.abs(x)] - (alpha - 1) * logs[np.abs(x - shift)]
    assert max(terms[0], terms[-1]) < terms.max() - 50  # nothing is cut off
    return float(np.log(np.exp(terms - terms.max()).sum()) + terms.max()) / (alpha - 1)


def test_the_reference_law_is_a_law() -> None:
    logs = skellam_logs(5.0, 60)
    x = np.arange(61)
    assert 2 * float((np.exp(logs) * x**2).sum()) == pytest.approx(5.0, rel=1e-12)
    assert math.exp(logs[0]) == pytest.approx(math.exp(-5) * 27.239871823604442, rel=1e-12)  # I₀(5)


@pytest.mark.parametrize("mu", [4, 10, 30, 100, 300, 1000])
@pytest.mark.parametrize("shift", [1, 3])
def test_no_exact_divergence_exceeds_the_bound(mu: int, shift: int) -> None:
    for alpha in range(2, 17):
        exact, bound = divergence(mu, shift, alpha), float(rdp(alpha, shift, bound_l1(shift, 1), mu))
        assert exact <= bound, (mu, shift, alpha)
        assert bound <= exact * (1 + 6 / mu) or mu < 100, (mu, shift, alpha)  # and is met as noise grows


@pytest.mark.parametrize(
    ("alpha", "delta_2", "delta_1", "mu", "by_hand"),
    [
        (2, 1, 1, 4, 0.25 + (3 + 6) / 64),
        (16, 3, 3, 100, 0.72 + (31 * 9 + 18) / 40_000),
        (5, 10, 20, 2.0**20, 250 / 2**20 + (900 + 120) / 2**42),
        (100, 1, 1, 2, 25 + 3 / 4),  # the other branch of the minimum
    ],
)
def test_the_bound_is_the_published_one(alpha: int, delta_2: int, delta_1: int, mu: float, by_hand: float) -> None:
    """Its second term is looser than single divergences show, so these cannot tell a smaller one from it."""
    assert float(rdp(alpha, delta_2, delta_1, mu)) == pytest.approx(by_hand, rel=1e-14)


def test_two_coordinates_cost_no_more_than_the_bound_of_both() -> None:
    for mu in (4, 50):
        for shifts in ((1, 1), (1, 2), (2, 2)):
            squares, ones = sum(s * s for s in shifts), sum(shifts)
            for alpha in range(2, 17):
                exact = sum(divergence(mu, s, alpha) for s in shifts)
                assert exact <= float(rdp(alpha, math.sqrt(squares), ones, mu))


@pytest.mark.parametrize("case", REFERENCE["gaussian"], ids=str)
def test_noise_on_a_fine_grid_costs_what_dp_accounting_says_of_gaussian_noise(case: dict[str, float]) -> None:
    ours = epsilon(case["noise"], case["delta"], int(case["rounds"]), **FINE)
    # dp-accounting also tries orders between integers, which matters where the best order is below 5.
    assert case["epsilon"] * (1 - 1e-9) <= ours <= case["epsilon"] * (1.01 if case["epsilon"] < 10 else 1.05)


@pytest.mark.parametrize("case", REFERENCE["discrete_gaussian"], ids=str)
def test_a_divergence_meets_that_of_discrete_gaussian_noise(case: dict[str, float]) -> None:
    delta_2 = int(case["delta_2"])
    ours = float(rdp(case["alpha"], delta_2, bound_l1(delta_2, 1), case["mu"]))
    assert case["rdp"] <= ours <= case["rdp"] * 1.01


@pytest.mark.parametrize("case", REFERENCE["exact"], ids=str)
def test_what_is_claimed_is_never_below_the_exact_cost(case: dict[str, float]) -> None:
    ours = epsilon(case["noise"], case["delta"], int(case["rounds"]), delta_2=1, dimension=1)
    assert case["epsilon"] <= ours <= 1.12 * case["epsilon"]


noises = st.floats(0.5, 200)
counts = st.integers(1, 5000)
bounds = st.integers(1, 2**20)
dimensions = st.integers(1, 10**5)
deltas = st.sampled_from([1e-3, 1e-5, 1e-9])


@settings(deadline=None, max_examples=200)
@given(noise=noises, rounds=counts, delta_2=bounds, dimension=dimensions, delta=deltas, more=st.floats(1.001, 10))
def test_epsilon_rises_with_rounds_and_falls_with_noise_and_delta(
    noise: float, rounds: int, delta_2: int, dimension: int, delta: float, more: float
) -> None:
    here = epsilon(noise, delta, rounds, delta_2=delta_2, dimension=dimension)
    assert here <= epsilon(noise, delta, rounds + 1, delta_2=delta_2, dimension=dimension)
    assert here >= epsilon(noise * more, delta, rounds, delta_2=delta_2, dimension=dimension)
    assert here >= epsilon(noise, delta * more, rounds, delta_2=delta_2, dimension=dimension)
    assert here <= epsilon(noise, delta, rounds, delta_2=delta_2, dimension=dimension * 2)
    mu = (noise * delta_2) ** 2  # the same noise covers a wider clip less
    narrow, wide = (spent([Release(d, bound_l1(d, 50), mu, rounds)], delta) for d in (delta_2, delta_2 + 1))
    assert 0 <= narrow <= wide


@settings(deadline=None, max_examples=100)
@given(target=st.floats(0.05, 20), delta=deltas, rounds=counts, delta_2=bounds, dimension=dimensions)
def test_the_noise_for_a_target_meets_it_and_no_less_noise_does(
    target: float, delta: float, rounds: int, delta_2: int, dimension: int
) -> None:
    noise = noise_for(target, delta, rounds, delta_2=delta_2, dimension=dimension)
    assert epsilon(noise, delta, rounds, delta_2=delta_2, dimension=dimension) <= target
    less = (round(noise * GRID) - 1) / GRID
    assert epsilon(less, delta, rounds, delta_2=delta_2, dimension=dimension) > target
    assert float(f"{noise:.4f}") == noise  # a plan's file shows all of it


@settings(deadline=None, max_examples=100)
@given(data=st.data(), delta=deltas)
def test_releases_add_up_in_any_order_and_any_grouping(data: st.DataObject, delta: float) -> None:
    one = st.builds(Release, bounds, st.integers(0, 2**25), st.floats(2**20, 2**50), st.integers(0, 50))
    releases = data.draw(st.lists(one, max_size=5))
    single = [Release(r.delta_2, r.delta_1, r.mu) for r in releases for _ in range(r.count)]
    assert spent(single, delta) == pytest.approx(spent(reversed(releases), delta), rel=1e-9)


def test_nothing_released_costs_nothing_and_no_noise_costs_everything() -> None:
    assert spent([], 1e-5) == spent([Release(3, 3, 1.0, 0)], 1e-5) == spent([Release(0, 0, 1.0, 9)], 1e-5) == 0
    assert epsilon(1.0, 1e-5, 0, **FINE) == epsilon(0.0, 1e-5, 5, delta_2=0, dimension=3) == 0
    assert epsilon(0.0, 1e-5, 1, **FINE) == math.inf
    assert noise_for(1.0, 1e-5, 0, **FINE) == 0


def test_what_makes_no_sense_is_refused() -> None:
    for delta in (0.0, 1.0, -1e-5, math.nan):
        with pytest.raises(ValueError, match="delta between 0 and 1"):
            epsilon(1.0, delta, 1, **FINE)
    with pytest.raises(ValueError, match="epsilon above 0"):
        noise_for(0.0, 1e-5, 10, **FINE)
    with pytest.raises(ValueError, match="no noise up to"):
        noise_for(1e-9, 1e-5, 10, **FINE)
    with pytest.raises(ValueError, match="variance above 0"):
        Release(1, 1, 0.0)


# A client's ledger

releases = st.builds(Release, st.integers(1, 10**6), st.integers(1, 10**7), st.floats(1, 1e15), st.integers(1, 5))


@given(st.lists(releases, max_size=6), st.randoms())
def test_what_was_paid_adds_up_in_any_order(paid: list[Release], random: object) -> None:
    shuffled = sorted(paid, key=lambda _: random.random())  # type: ignore[attr-defined]
    one, other = Ledger(), Ledger()
    for release in paid:
        one.add(release)
    for release in shuffled:
        other.add(release)
    assert one.epsilon(1e-5) == pytest.approx(spent(paid, 1e-5)) == pytest.approx(other.epsilon(1e-5))
    assert sum(release.count for release in one.releases()) == sum(release.count for release in paid)


@given(st.floats(0.1, 50), st.floats(1e4, 1e7))
def test_a_budget_is_never_exceeded_and_stays_spent(epsilon: float, mu: float) -> None:
    ledger, charge = Ledger(), Charge(Release(1000, 4000, mu), Budget(epsilon, 1e-5))
    for _ in range(300):
        try:
            ledger.require(charge)
        except RefusalError:
            break
        ledger.add(charge.release)
    assert ledger.epsilon(1e-5) <= epsilon
    if sum(release.count for release in ledger.releases()) == 300:
        return
    with pytest.raises(RefusalError, match="this client's budget is spent"):
        ledger.require(charge)
