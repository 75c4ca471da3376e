"""Keys differ where they must, the stream is AES in counter mode, and random orders use everything once."""

import struct
from typing import get_args

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR
from hypothesis import given, settings, strategies as st

from baffle.core.seeds import BLOCK, SALTED, Purpose, Seeds, batch_indices, keystream, permutation

KEY = bytes(range(32))
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)


def counter_mode(key: bytes, lane: int, first: int, blocks: int) -> bytes:
    return Cipher(AES256(key), CTR(struct.pack(">QQ", lane, first))).encryptor().update(bytes(BLOCK * blocks))


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


@settings(deadline=None, max_examples=50)
@given(lane=st.integers(0, 2**64 - 3), first=st.integers(0, 2**40), lanes=st.integers(1, 3), blocks=st.integers(1, 20))
def test_the_stream_is_aes_in_counter_mode(lane: int, first: int, lanes: int, blocks: int) -> None:
    rows = keystream(KEY, range(lane, lane + lanes), first, blocks)
    assert [row.tobytes() for row in rows] == [counter_mode(KEY, lane + i, first, blocks) for i in range(lanes)]


@pytest.mark.parametrize("n", [1, 2, 3, 7, 100, 1797])
def test_a_permutation_sorts_positions_by_their_tickets(n: int) -> None:
    tickets = struct.unpack(f"<{n}Q", counter_mode(KEY, 0, 0, n)[: 8 * n])
    assert permutation(KEY, n).tolist() == sorted(range(n), key=tickets.__getitem__)


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
