"""The graph of a round: complete or regular, the same for all, with a threshold that contradictions cannot reach."""

import secrets
from fractions import Fraction
from math import comb

import pytest

from baffle.aggregation.graph import COMPLETE_UP_TO, DROPOUT, FAILURE, degree, graph

SEED = bytes(range(32))


@pytest.mark.parametrize("n", [0, 1, 2, 3, 10, 199, 200])
def test_small_rounds_are_complete(n: int) -> None:
    members = tuple(range(5, 5 + 3 * n, 3))
    drawn = graph(members, SEED)
    assert drawn.k == max(n - 1, 0)
    assert drawn.neighbours == {member: [other for other in members if other != member] for member in members}


def test_the_least_threshold_of_a_complete_graph_is_a_majority() -> None:
    for n in range(2, COMPLETE_UP_TO + 1):
        assert graph(tuple(range(n)), SEED).least_threshold == n // 2 + 1


@pytest.mark.parametrize("n", [201, 202, 333, 1000])
def test_large_rounds_are_regular_and_symmetric(n: int) -> None:
    members = tuple(range(3, 3 + 2 * n, 2))
    drawn = graph(members, SEED)
    assert drawn.k == degree(n, DROPOUT) < n
    assert set(drawn.neighbours) == set(members)
    neighbours_of = dict(drawn.neighbours)
    for member, neighbours in neighbours_of.items():
        assert neighbours == sorted(set(neighbours))
        assert len(neighbours) == drawn.k
        assert member not in neighbours
        assert all(member in neighbours_of[other] for other in neighbours)


def test_a_large_graph_is_connected_and_follows_from_its_seed() -> None:
    members = tuple(range(1000))
    drawn = graph(members, SEED)
    reached, edge = {0}, [0]
    while edge:
        new = {peer for member in edge for peer in drawn.neighbours[member]} - reached
        reached |= new
        edge = list(new)
    assert reached == set(members)
    assert graph(members, SEED) == drawn
    assert graph(members, secrets.token_bytes(32)) != drawn


@pytest.mark.parametrize(("n", "k", "t"), [(1000, 172, 87), (10_000, 232, 117)])
def test_degrees_of_reference(n: int, k: int, t: int) -> None:
    assert degree(n, 0.3) == k
    assert graph(tuple(range(n)), SEED).k == k
    assert graph(tuple(range(n)), SEED).least_threshold == t


def failure(n: int, k: int) -> Fraction:
    """A bound on the probability that some client keeps at most k/2 neighbours, in exact arithmetic."""
    stay = n - round(DROPOUT * n)
    few = sum(comb(stay, kept) * comb(n - 1 - stay, k - kept) for kept in range(k // 2 + 1))
    return n * Fraction(few, comb(n - 1, k))


@pytest.mark.parametrize("n", [400, 1000])
def test_the_degree_is_the_smallest_that_does(n: int) -> None:
    k = degree(n, DROPOUT)
    assert failure(n, k) <= FAILURE < failure(n, k - 2)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 10, 11, 199, 200, 201, 300, 1000])
def test_contradictions_never_reach_the_threshold_twice(n: int) -> None:
    """The k neighbours and the client itself hold shares: too few for t to be told alive and t others dropped."""
    drawn = graph(tuple(range(n)), SEED)
    t, holders = drawn.least_threshold, drawn.k + 1
    assert 2 * t - 1 > drawn.k
    assert 2 * t > holders
    assert 2 * (t - 1) <= holders
    assert t <= holders
