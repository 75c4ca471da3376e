"""A client's ledger: what it has paid adds up, whatever the order, and a budget is never exceeded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baffle.errors import RefusalError
from baffle.privacy.accounting import Release, spent
from baffle.privacy.ledger import Budget, Charge, Ledger

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
    else:
        return
    assert ledger.epsilon(1e-5) <= epsilon
    with pytest.raises(RefusalError, match="this client's budget is spent"):
        ledger.require(charge)


def test_without_a_budget_everything_is_paid_and_nothing_refused() -> None:
    ledger, charge = Ledger(), Charge(Release(1000, 4000, 1e4))
    for _ in range(1000):
        ledger.require(charge)
        ledger.add(charge.release)
    assert ledger.epsilon(1e-5) > 1000
    assert [release.count for release in ledger.releases()] == [1000]
