"""Partitions: how samples are shared out among clients."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from baffle.core.arrays import I64
from baffle.data.partition import by_domain, by_writer, class_counts, dirichlet, iid, share_out
from baffle.data.sources import Dataset, Source
from baffle.errors import DataError, PlanError
from baffle.plan import FederationSettings, Plan, load

KEY = bytes(32)
keys = st.binary(min_size=32, max_size=32)


@given(keys, st.integers(1, 400), st.data())
def test_every_sample_goes_to_one_client_and_shares_are_even(key: bytes, samples: int, data: st.DataObject) -> None:
    clients = data.draw(st.integers(1, samples))
    shares = iid(key, samples, clients)
    assert len(shares) == clients
    np.testing.assert_array_equal(np.sort(np.concatenate(shares)), np.arange(samples))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1


DOMAIN_OF = np.array([0] * 9 + [1] * 3 + [2] * 5)


@pytest.mark.parametrize(
    ("divide", "words"),
    [
        (lambda: iid(KEY, 10, 11), "11 clients cannot share 10 samples.*at most 10"),
        (lambda: dirichlet(KEY, np.zeros(100, np.int64), 11, 0.3, 10), "11 .* share 100 .*least 10 each.*at most 10"),
        (lambda: by_domain(KEY, DOMAIN_OF, 10), "10 .*among 3 domains; set it to a multiple of 3"),
        (lambda: by_domain(KEY, DOMAIN_OF, 12), "4 clients cannot share a domain's 3 .*at most 9"),
        (lambda: by_writer(KEY, DOMAIN_OF, 4), "4 clients, but only 3 writers; set it to at most 3"),
    ],
)
def test_more_clients_than_there_are_shares_for_are_refused(divide: Callable[[], object], words: str) -> None:
    with pytest.raises(PlanError, match=rf"federation\.clients: {words}"):
        divide()
    assert len(by_domain(KEY, DOMAIN_OF, 9)) == 9


def _same(shares: list[I64], others: list[I64]) -> bool:
    return len(shares) == len(others) and all(np.array_equal(a, b) for a, b in zip(shares, others, strict=True))


@given(
    keys,
    st.lists(st.integers(0, 9), min_size=1, max_size=300),
    st.floats(0, 1e308, exclude_min=True) | st.floats(1e-3, 10),
    st.data(),
)
def test_dirichlet_gives_every_sample_to_one_client_and_keeps_the_floor(
    key: bytes, labels: list[int], alpha: float, data: st.DataObject
) -> None:
    floor = data.draw(st.integers(1, len(labels)))
    clients = data.draw(st.integers(1, len(labels) // floor))
    shares = dirichlet(key, np.array(labels), clients, alpha, floor)
    assert len(shares) == clients
    np.testing.assert_array_equal(np.sort(np.concatenate(shares)), np.arange(len(labels)))
    assert min(len(share) for share in shares) >= floor
    assert _same(shares, dirichlet(key, np.array(labels), clients, alpha, floor))


LABELS = np.arange(10_000) % 10


@given(keys)
def test_classes_are_spread_with_a_large_alpha_and_go_to_one_client_each_with_a_small_one(key: bytes) -> None:
    counts = class_counts(LABELS, dirichlet(key, LABELS, 5, 1e6, 1), 10)
    # The last classes go to clients that are below an even share, so only the first are spread over all clients.
    assert np.abs(counts[:, :8] - 200).max() < 6 * np.sqrt(200)
    assert np.abs(counts.sum(1) - 2000).max() < 700
    counts = class_counts(LABELS, dirichlet(key, LABELS, 5, 1e-9, 1), 10)
    np.testing.assert_array_equal(np.sort(counts, axis=0)[-1], 1000)
    np.testing.assert_array_equal(counts.sum(1), 2000)


def test_shares_of_a_class_have_the_moments_of_a_dirichlet_distribution() -> None:
    clients, alpha, one_class = 4, 0.5, np.zeros(400, np.int64)
    drawn = [dirichlet(i.to_bytes(32, "big"), one_class, clients, alpha, 1) for i in range(800)]
    shares = np.array([[len(share) for share in shares] for shares in drawn]) / 400
    mean = 1 / clients
    variance = mean * (1 - mean) / (clients * alpha + 1)
    np.testing.assert_allclose(shares.mean(0), mean, atol=0.04)
    np.testing.assert_allclose(shares.var(0), variance, rtol=0.15)


PUBLISHED = [
    [21, 9, 33, 37, 1, 13, 5],
    [28, 3, 7, 39, 27, 19, 24, 15, 35, 23, 11, 36, 31],
    [8, 6, 34, 14, 17, 20, 38, 18, 10, 16, 29, 4, 0, 30, 26, 25, 12, 2, 22, 32],
]


def test_shares_are_in_random_order_and_those_of_a_key_never_change() -> None:
    first, _ = iid(KEY, 10_000, 2)
    assert not np.array_equal(first, iid(b"x" * 32, 10_000, 2)[0])
    assert abs(np.mean(first < 5_000) - 0.5) < 0.05
    shares = dirichlet(bytes(range(32)), np.arange(40) % 4, 3, 0.3, 5)
    assert [share.tolist() for share in shares] == PUBLISHED


@given(keys, st.lists(st.integers(2, 9), min_size=1, max_size=5), st.integers(1, 2))
def test_clients_of_a_domain_share_it_evenly(key: bytes, sizes: list[int], each: int) -> None:
    domain_of = np.repeat(np.arange(len(sizes)), sizes)[::-1].copy()
    shares = by_domain(key, domain_of, each * len(sizes))
    np.testing.assert_array_equal(np.sort(np.concatenate(shares)), np.arange(len(domain_of)))
    for client, share in enumerate(shares):
        assert set(domain_of[share]) == {client // each}
        assert abs(len(share) - sizes[client // each] / each) < 1
    assert _same(shares, by_domain(key, domain_of, each * len(sizes)))


@given(keys, st.lists(st.sampled_from([0, 3, 7, 2599, 12]), min_size=1, max_size=60), st.data())
def test_every_client_is_one_writer(key: bytes, writers: list[int], data: st.DataObject) -> None:
    writer_of = np.array(writers)
    people = len(set(writers))
    everyone = by_writer(key, writer_of, people)
    np.testing.assert_array_equal(np.sort(np.concatenate(everyone)), np.arange(len(writers)))
    assert len({int(writer_of[share[0]]) for share in everyone}) == people
    for share in everyone:
        np.testing.assert_array_equal(np.sort(share), np.flatnonzero(writer_of == writer_of[share[0]]))
    fewer = data.draw(st.integers(1, people))
    assert _same(by_writer(key, writer_of, fewer), everyone[:fewer])


def _source(**groups: Any) -> Source:
    data = Dataset(np.zeros((40, 1), np.float32), np.arange(40) % 4, lambda x: x, **groups)
    return Source(data, data, 4, ("a", "b") if "domain_of" in groups else ())


def _plan(partition: str, clients: int = 2, seed: int = 0, **more: float) -> Plan:
    return Plan(seed=seed, federation=FederationSettings(clients=clients, partition=partition, **more))  # type: ignore[arg-type]


def test_a_plan_names_its_partition() -> None:
    source = _source(domain_of=np.arange(40) // 20, writer_of=np.arange(40) // 20)
    for partition in ("iid", "dirichlet", "domain", "writer"):
        shares = share_out(_plan(partition), source)
        assert _same(shares, share_out(_plan(partition), source))
        assert not _same(shares, share_out(_plan(partition, seed=1), source))
    for partition in ("domain", "writer"):
        assert [len(set(share // 20)) for share in share_out(_plan(partition), source)] == [1, 1]
    uneven, even = (share_out(_plan("dirichlet", alpha=alpha), source) for alpha in (0.1, 10.0))
    assert not _same(uneven, even)
    with pytest.raises(PlanError, match="least 21 each"):
        share_out(_plan("dirichlet", floor_samples=21), source)


def test_a_partition_needs_data_with_its_groups() -> None:
    with pytest.raises(PlanError, match=r'federation\.partition: digits has no domains; expected "pacs"'):
        share_out(_plan("domain"), _source())
    with pytest.raises(PlanError, match=r"federation\.partition: digits has no writers.*qmnist-train-labels"):
        share_out(_plan("writer"), _source())
    with pytest.raises(PlanError, match=r"mine:data has no writers; expected writer_of in the baffle\.Dataset of its"):
        share_out(load("digits", {"task.data": "mine:data", "federation.partition": "writer"}), _source())
    with pytest.raises(PlanError, match="have no writers; give a list with the data of each writer"):
        share_out(load("digits", {"task.data": "given:0", "federation.partition": "writer"}), _source())
    with pytest.raises(DataError, match="writer_of: expected an entry for each of 40 samples, got 39"):
        _source(writer_of=np.arange(39))
