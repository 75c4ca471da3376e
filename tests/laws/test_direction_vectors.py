"""Directions, version 1: two implementations that share no code give the published numbers."""

import json
import math
import struct
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings, strategies as st

from baffle.core.directions import DISTRIBUTIONS, OUTER, SPHERE, Directions, distribution_of, gaussian_table
from baffle.core.seeds import OF_THE_TRAJECTORY, SALTED, Purpose, Seeds, keystream
from tests.protocol import directions as second

PUBLISHED = (Path(__file__).parents[1] / "vectors" / "directions.json").read_text(encoding="ascii")
VECTORS: dict[str, list[dict[str, Any]]] = json.loads(PUBLISHED)

Draw = Callable[[bytes, str, int, int, int], list[int]]


def draw_first(key: bytes, distribution: str, k: int, start: int, stop: int) -> list[int]:
    (row,) = Directions(key, DISTRIBUTIONS[distribution]).draw(range(k, k + 1), start, stop)
    return [int(z) for z in row]


def draw_second(key: bytes, distribution: str, k: int, start: int, stop: int) -> list[int]:
    numbers: list[int] = second.DRAW["gaussian" if distribution == "sphere" else distribution](key, k, start, stop)
    return numbers


def test_the_second_implementation_needs_nothing_but_the_standard_library_and_prints_the_published_vectors() -> None:
    printed = subprocess.run(
        [sys.executable, "-I", "-S", second.__file__], check=True, capture_output=True, text=True
    ).stdout
    assert printed == PUBLISHED


def test_aes_256_gives_the_known_answer_of_fips_197() -> None:
    key, plain = bytes(range(32)), bytes.fromhex("00112233445566778899aabbccddeeff")
    assert bytes(second.S_BOX[:16]).hex() == "637c777bf26b6fc53001672bfed7ab76"
    assert second.encrypt(key, plain).hex() == "8ea2b7ca516745bfeafc49904b496089"
    lane, block = struct.unpack(">QQ", plain)
    assert keystream(key, range(lane, lane + 1), block, 1).tobytes().hex() == "8ea2b7ca516745bfeafc49904b496089"


@pytest.mark.parametrize(
    ("ikm", "salt", "info", "expected"),
    [
        (
            "0b" * 22,
            "000102030405060708090a0b0c",
            "f0f1f2f3f4f5f6f7f8f9",
            "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf",
        ),
        ("0b" * 22, "", "", "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d"),
    ],
)
def test_hkdf_gives_the_known_answers_of_rfc_5869(ikm: str, salt: str, info: str, expected: str) -> None:
    assert second.hkdf(bytes.fromhex(ikm), bytes.fromhex(salt), bytes.fromhex(info)).hex() == expected


def test_the_gaussian_table_is_the_published_one() -> None:
    (published,) = VECTORS["tables"]
    assert sha256(gaussian_table().astype("<i2").tobytes()).hexdigest() == published["sha256"]
    assert gaussian_table().tolist() == second.gaussian_table()


def test_every_purpose_has_its_published_keys() -> None:
    for vector in VECTORS["keys"] + VECTORS["salted keys"]:
        root, purpose, salt = int(vector["root"]), vector["purpose"], bytes.fromhex(vector["salt"])
        numbers = [int(number) for number in vector["numbers"]]
        if "digest" in vector:
            digest = bytes.fromhex(vector["digest"])
            keys = [Seeds(root, digest, salt).key(purpose, *numbers)]
            keys.append(second.salted_key_of(root, digest, salt, purpose, *numbers))
        else:
            keys = [Seeds(root, salt).key(purpose, *numbers), second.key_of(root, salt, purpose, *numbers)]
        assert [key.hex() for key in keys] == [vector["key"]] * 2, vector
    assert {vector["purpose"] for vector in VECTORS["salted keys"]} == SALTED
    assert {vector["purpose"] for vector in VECTORS["keys"]} == set(get_args(Purpose))
    assert {vector["purpose"] for vector in VECTORS["keys"] if vector["salt"]} == OF_THE_TRAJECTORY


@pytest.mark.parametrize("draw", [draw_first, draw_second])
def test_directions_are_the_published_ones(draw: Draw) -> None:
    for vector in VECTORS["directions"]:
        place = int(vector["k"]), int(vector["start"]), int(vector["stop"])
        assert draw(bytes.fromhex(vector["key"]), vector["distribution"], *place) == vector["z"], vector


def test_stretches_onto_the_sphere_are_the_published_ones_to_the_last_bit() -> None:
    for vector in VECTORS["stretches"]:
        key, k, n = bytes.fromhex(vector["key"]), int(vector["k"]), int(vector["n"])
        (stretch,) = Directions(key, SPHERE).stretch([k], n)
        assert float(stretch).hex() == second.stretch(key, k, n).hex() == vector["stretch"]


def draw_first_outer(key: bytes, k: int, shapes: list[list[int]], start: int, stop: int) -> list[int]:
    drawn = Directions(key, distribution_of(OUTER, tuple(map(tuple, shapes)))).draw([k], start, stop)
    return [int(z) for z in drawn[0]]


@pytest.mark.parametrize("draw", [draw_first_outer, second.outer])
def test_outer_directions_are_the_published_ones(
    draw: Callable[[bytes, int, list[list[int]], int, int], list[int]],
) -> None:
    for vector in VECTORS["outer"]:
        key, k = bytes.fromhex(vector["key"]), int(vector["k"])
        start, stop = int(vector["start"]), int(vector["stop"])
        assert draw(key, k, vector["shapes"], start, stop) == vector["z"], vector


@settings(deadline=None, max_examples=100)
@given(
    key=st.binary(min_size=32, max_size=32),
    k=st.integers(0, 2**64 - 1),
    shapes=st.lists(st.lists(st.integers(1, 6), max_size=4), min_size=1, max_size=4),
    data=st.data(),
)
def test_both_implementations_agree_on_outer_directions_of_any_model(
    key: bytes, k: int, shapes: list[list[int]], data: st.DataObject
) -> None:
    n = sum(math.prod(shape) for shape in shapes)
    start = data.draw(st.integers(0, n - 1))
    stop = data.draw(st.integers(start + 1, min(n, start + 60)))
    assert draw_first_outer(key, k, shapes, start, stop) == second.outer(key, k, shapes, start, stop)


@settings(deadline=None, max_examples=100)
@given(
    key=st.binary(min_size=32, max_size=32),
    distribution=st.sampled_from(sorted(DISTRIBUTIONS)),
    k=st.integers(0, 2**64 - 1),
    start=st.integers(0, 300) | st.integers(0, 2**48),
    size=st.integers(1, 60),
)
def test_both_implementations_agree_everywhere(key: bytes, distribution: str, k: int, start: int, size: int) -> None:
    first = draw_first(key, distribution, k, start, start + size)
    assert first == draw_second(key, distribution, k, start, start + size)
