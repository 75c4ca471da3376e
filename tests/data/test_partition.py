"""How samples are shared out among clients."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baffle.data.partition import iid
from baffle.errors import PlanError


@given(st.binary(min_size=32, max_size=32), st.integers(1, 400), st.data())
def test_every_sample_goes_to_one_client_and_shares_are_even(key: bytes, samples: int, data: st.DataObject) -> None:
    clients = data.draw(st.integers(1, samples))
    shares = iid(key, samples, clients)
    assert len(shares) == clients
    np.testing.assert_array_equal(np.sort(np.concatenate(shares)), np.arange(samples))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1


def test_shares_follow_from_the_key() -> None:
    one, same, other = iid(bytes(32), 100, 4), iid(bytes(32), 100, 4), iid(b"x" * 32, 100, 4)
    for a, b in zip(one, same, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.array_equal(one[0], other[0])


def test_shares_are_in_random_order() -> None:
    share = iid(bytes(32), 10_000, 2)[0]
    assert abs(np.mean(share < 5_000) - 0.5) < 0.05


def test_more_clients_than_samples_are_refused() -> None:
    with pytest.raises(PlanError, match=r"federation\.clients: 11 clients cannot share 10 samples.*at most 10"):
        iid(bytes(32), 10, 11)
