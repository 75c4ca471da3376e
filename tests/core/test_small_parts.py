"""Samples in each of their forms, the rank of the right answer, scales of pixels, and freed memory."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, strategies as st

from baffle.core import samples
from baffle.core.arrays import ranks
from baffle.core.pixels import PixelScale
from baffle.core.ports import Batch
from baffle.core.samples import Samples
from baffle.errors import DataError

IDS = np.arange(14).reshape(7, 2)
FLOATS = np.linspace(0, 1, 21, dtype=np.float32).reshape(7, 3)
FORMS: dict[str, Samples] = {"array": IDS, "tuple": (IDS, FLOATS), "dict": {"ids": IDS, "floats": FLOATS}}
EVERY_FORM = pytest.mark.parametrize("form", FORMS)


@EVERY_FORM
@given(size=st.integers(0, 9))
def test_the_pieces_of_a_batch_are_the_batch(form: str, size: int) -> None:
    x = FORMS[form]
    pieces = Batch(x, np.arange(7)).pieces(size)
    assert [len(piece.y) for piece in pieces] == [samples.count(piece.x) for piece in pieces]
    assert all(len(piece.y) == (size or 7) for piece in pieces[:-1])
    assert {type(piece.x) for piece in pieces} == {type(x)}
    for position, array in enumerate(samples.arrays(x)):
        parts = [samples.arrays(piece.x)[position] for piece in pieces]
        np.testing.assert_array_equal(np.concatenate(parts), array)
        assert {part.dtype for part in parts} == {array.dtype}


@EVERY_FORM
def test_rows_are_taken_of_every_array_and_of_the_labels(form: str) -> None:
    rows = np.array([5, 0, 5])
    taken = Batch(FORMS[form], 10 * np.arange(7)).take(rows)
    assert taken.y.tolist() == [50, 0, 50]
    for part, whole in zip(samples.arrays(taken.x), samples.arrays(FORMS[form]), strict=True):
        np.testing.assert_array_equal(part, whole[rows])


def test_shapes_are_those_of_one_sample() -> None:
    shapes = {form: samples.shape_of(x) for form, x in FORMS.items()}
    assert shapes == {"array": (2,), "tuple": ((2,), (3,)), "dict": {"ids": (2,), "floats": (3,)}}
    assert [samples.is_plain(shape) for shape in shapes.values()] == [True, False, False]
    assert samples.is_plain(())
    assert samples.describe(FORMS["dict"]) == "ids: int64 of shape (2,), floats: float32 of shape (3,)"


@given(st.integers(1, 12), st.integers(0, 30), st.integers(0, 2**32 - 1))
def test_a_label_is_among_the_best_answers_exactly_where_its_rank_is_below_their_number(
    classes: int, count: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    outputs = rng.integers(-3, 4, (count, classes)).astype(np.float32)  # few values, so that many are equal
    labels = rng.integers(0, classes, count)
    places = ranks(outputs, labels)
    assert ((places == 0) == (outputs.argmax(1) == labels)).all()
    best_first = np.argsort(-outputs, axis=1, kind="stable")
    for top in range(1, classes + 1):
        assert ((places < top) == (best_first[:, :top] == labels[:, None]).any(1)).all()


def test_an_output_that_is_not_a_number_is_never_right() -> None:
    outputs = np.array([[np.nan, 0, 1], [np.nan, np.nan, np.nan], [5, np.nan, 1]], np.float32)
    assert ranks(outputs, np.array([0, 1, 0])).tolist() == [2, 2, 1]


means = st.floats(-2, 2)
deviations = st.floats(0.05, 5)


def scales(channels: int) -> st.SearchStrategy[PixelScale]:
    return st.builds(PixelScale, st.tuples(*[means] * channels), st.tuples(*[deviations] * channels))


@given(scales(1) | scales(3), scales(1) | scales(3), st.floats(0, 1))
def test_what_is_left_to_do_after_a_scale_gives_the_wanted_one(
    wanted: PixelScale, applied: PixelScale, pixel: float
) -> None:
    def scaled(value: object, scale: PixelScale) -> object:
        return (np.asarray(value) - scale.mean) / scale.deviation

    once = np.broadcast_to(np.asarray(scaled(pixel, wanted)), 3)
    twice = np.broadcast_to(np.asarray(scaled(scaled(pixel, applied), wanted.after(applied))), 3)
    np.testing.assert_allclose(twice, once, atol=1e-6)


@pytest.mark.parametrize(
    ("mean", "deviation"),
    [((), ()), ((0.5,), (0.5, 0.5)), ((0.5,), (0.0,)), ((0.5,), (-1.0,)), ((float("nan"),), (1.0,))],
)
def test_numbers_that_are_no_scale_are_refused(mean: tuple[float, ...], deviation: tuple[float, ...]) -> None:
    with pytest.raises(DataError, match="a PixelScale needs"):
        PixelScale(mean, deviation)


FAULTS = """
import resource
import numpy as np
from baffle.core.freed_memory import keep_freed_memory

if {kept}:
    keep_freed_memory()

def work():
    vectors = [np.ones(900_000, np.float32) for _ in range(6)]
    return sum(float(vector[0]) for vector in vectors)

work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc gives memory back")
def test_kept_memory_is_not_faulted_in_again() -> None:
    kept, given_back = (
        int(subprocess.run([sys.executable, "-c", FAULTS.format(kept=kept)], check=True, capture_output=True).stdout)
        for kept in (True, False)
    )
    assert kept < given_back / 5
