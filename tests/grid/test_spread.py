"""What several seeds come to: which rows are equal, and the letters that say so."""

from hypothesis import given, strategies as st

from baffle.grid.spread import Spread, letters_of

SPREADS = st.lists(
    st.lists(st.integers(0, 12).map(float), min_size=1, max_size=3).map(lambda v: Spread(tuple(v))), max_size=7
)


def test_rows_are_equal_if_their_means_differ_by_no_more_than_one_of_them_scatters() -> None:
    scattered, near, far = Spread((80.0, 82.0)), Spread((82.9, 83.1)), Spread((83.4, 83.6))
    assert scattered.equals(near)
    assert near.equals(scattered)
    assert not scattered.equals(far)
    assert not Spread((80.0,)).equals(Spread((80.0,)))  # one seed shows no spread
    assert letters_of([scattered, near, far]) == ["a", "a", ""]


@given(SPREADS)
def test_rows_share_a_letter_if_and_only_if_they_are_equal(spreads: list[Spread]) -> None:
    letters = letters_of(spreads)
    for one, its in zip(spreads, letters, strict=True):
        for other, others in zip(spreads, letters, strict=True):
            if one is not other:
                assert bool(set(its) & set(others)) == one.equals(other)
        assert bool(its) == any(one.equals(other) for other in spreads if other is not one)


def test_a_hundred_equal_rows_share_one_letter() -> None:
    assert letters_of([Spread((1.0, 2.0))] * 100) == ["a"] * 100
