"""Samples in each of their forms: cut up and put together again, they are what they were."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baffle.core import samples
from baffle.core.ports import Batch
from baffle.core.samples import Samples

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
