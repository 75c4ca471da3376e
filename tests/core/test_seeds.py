"""Keys differ where they must, the stream is AES in counter mode, and random orders use everything once."""

from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from baffle.core.seeds import BLOCK, SALTED, Purpose, Seeds, batch_indices, keystream, permutation

KEY = bytes(range(32))
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)


@pytest.mark.parametrize("purpose", PURPOSES)
def test_only_keys_that_make_the_trajectory_and_salted_keys_depend_on_its_digest(purpose: Purpose) -> None:
    asked_in_rounds = {"directions", "local", "batches", "augment", "participation", "groups"}
    for salt, dependent in ((b"", {"directions", "local"}), (b"s" * 32, asked_in_rounds)):
        one, other = (Seeds(3, digest * 32, salt).key(purpose, 5) for digest in (b"1", b"2"))
        assert (one != other) == (purpose in dependent)


hashes = st.binary(min_size=32, max_size=32)
numbers = st.lists(st.integers(0, 2**64 - 1), max_size=3)


@given(st.sampled_from(PURPOSES), st.lists(hashes, min_size=2, max_size=2, unique=True), hashes, numbers)
def test_two_salts_share_no_key_of_a_round(
    purpose: Purpose, salts: list[bytes], digest: bytes, numbers: list[int]
) -> None:
    """So two runs of one plan never ask the same question. A simulation, without a salt, shares none with either."""
    keys = {Seeds(3, digest, salt).key(purpose, *numbers) for salt in (b"", *salts)}
    assert len(keys) == (3 if purpose in SALTED else 1)


def test_a_number_that_does_not_fit_is_refused() -> None:
    for number in (-1, 2**64):
        with pytest.raises(OverflowError):
            Seeds(0, bytes(32)).key("directions", number)


@settings(deadline=None, max_examples=100)
@given(n=st.integers(1, 40), size=st.integers(1, 100), turns=st.integers(1, 12))
def test_batches_follow_each_other_through_one_lap_after_the_other(n: int, size: int, turns: int) -> None:
    seeds = Seeds(0, b"")

    def key_of(lap: int) -> bytes:
        return seeds.key("batches", lap)

    batches = [batch_indices(key_of, n, size, turn) for turn in range(turns)]
    assert all(len(batch) == size for batch in batches)
    laps = np.concatenate([permutation(key_of(lap), n) for lap in range(-(-turns * size // n))])
    assert np.concatenate(batches).tolist() == laps[: turns * size].tolist()


def test_nothing_can_be_asked_of_the_stream() -> None:
    assert keystream(bytes(32), range(3), 5, 0).shape == (3, 0)
    assert keystream(bytes(32), range(0), 0, 2).shape == (0, 2 * BLOCK)
    assert permutation(bytes(32), 0).tolist() == []
