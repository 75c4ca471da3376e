"""Archives as strangers write them. tests/data has more, through the data sets."""

import io
import zipfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from baffle.archives import open_archive, read_array, read_member
from tests.support.memory import at_most

MOST = 1 << 20


@given(
    arrays.arrays(
        st.sampled_from(["u1", "<i8", ">f4", "?", "<c16", "U3"]), arrays.array_shapes(min_dims=0, min_side=0)
    ),
    st.booleans(),
)
def test_an_array_is_read_back(tmp_path_factory: pytest.TempPathFactory, array: np.ndarray, fortran: bool) -> None:
    path = tmp_path_factory.mktemp("npz") / "some.npz"
    np.savez_compressed(path, x=np.asfortranarray(array) if fortran else array)
    with open_archive(path, MOST, MOST) as archive:
        again = read_array(archive, "x")
    assert again.dtype == array.dtype
    np.testing.assert_array_equal(again, array)


def _npz(path: Path, content: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", content)
    return path


@given(st.data())
def test_whatever_an_array_holds_it_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    file = io.BytesIO()
    np.save(file, np.arange(12, dtype=np.uint8).reshape(3, 4))
    content = bytearray(file.getvalue())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = _npz(tmp_path_factory.mktemp("npz") / "some.npz", bytes(content[: data.draw(st.integers(0, len(content)))]))
    with open_archive(path, MOST, MOST) as archive, suppress(ValueError):
        assert read_array(archive, "x").nbytes <= len(content)


def test_objects_are_not_read(tmp_path: Path) -> None:
    file = io.BytesIO()
    np.save(file, np.array([print], object), allow_pickle=True)
    with open_archive(_npz(tmp_path / "a.npz", file.getvalue()), MOST, MOST) as archive:
        with pytest.raises(ValueError, match=r"a\.npz: x is damaged or cannot be read"):
            read_array(archive, "x")
        with pytest.raises(ValueError, match=r"a\.npz holds no y"):
            read_member(archive, "y")


def test_members_together_may_be_too_large(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(100):
            archive.writestr(str(number), bytes(MOST))
    with at_most(MOST), pytest.raises(ValueError, match=r"a\.zip would unpack to 104,857,600 bytes, expected at most"):
        open_archive(tmp_path / "a.zip", MOST, 10 * MOST)
