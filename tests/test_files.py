"""Files are replaced atomically, belong to their owner alone, and are read only if they are not too long. Archives and
texts from untrusted sources. tests/data has more tests of archives, through data sets."""

import errno
import fcntl
import io
import os
import stat
import zipfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as arrays

from baffle.archives import open_archive, read_array, read_member
from baffle.errors import first_line, one_line
from baffle.files import ROOM, append, is_open_to_others, make_folder, read_file, replace, require_room
from tests.support.environments import PAGE, small_disk
from tests.support.memory import at_most


@pytest.mark.parametrize("step", ["open", "fsync", "rename"])
def test_when_it_fails_the_old_content_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    path = tmp_path / "some.json"
    replace(path, b"old")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as broken:
        broken.setattr(os, {"open": "open", "fsync": "fsync", "rename": "replace"}[step], full)
        with pytest.raises(OSError, match="No space"):
            replace(path, b"new and longer")
    assert path.read_bytes() == b"old"
    replace(path, b"new and longer")  # the failure left nothing in the way
    assert path.read_bytes() == b"new and longer"
    assert list(path.parent.iterdir()) == [path]


def test_what_has_no_room_is_not_appended_in_part(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        path = disk.folder / "some.jsonl"
        append(path, b"one\n")
        disk.fill(leave=2)
        with pytest.raises(OSError, match="No space"):
            append(path, bytes(4 * PAGE))
        assert path.read_bytes() == b"one\n"
        disk.free()
        append(path, b"two\n")
        assert path.read_bytes() == b"one\ntwo\n"


def test_room_is_required_and_left(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        path = disk.folder / "some.sqlite"
        path.touch()
        require_room(path)
        disk.fill(leave=ROOM // PAGE)
        require_room(path)
        disk.fill(leave=ROOM // PAGE - 1)
        with pytest.raises(OSError, match="No space"):
            require_room(path)
        assert sorted(file.name for file in disk.folder.iterdir()) == ["ballast", "some.sqlite"]


LEFT = ".baffle-0123456789abcdef.new"


def test_what_a_killed_process_left_is_removed_and_what_another_is_writing_stays(tmp_path: Path) -> None:
    left = [tmp_path / LEFT, tmp_path / LEFT.replace("0", "1"), tmp_path / ".baffle-mine.new"]
    for path in left:
        path.write_bytes(b"half")
    with left[1].open("rb") as busy:
        fcntl.flock(busy, fcntl.LOCK_EX)
        replace(tmp_path / "one", b"1")
    assert [path.exists() for path in left] == [False, True, True]
    os.mkfifo(left[0])
    require_room(tmp_path / "one")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".baffle-mine.new", "one"]


def test_a_new_file_that_was_taken_for_one_left_behind_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may look between the moments at which a file is made and locked."""
    lock, thefts = fcntl.flock, iter([True])

    def steal(file: int, how: int) -> None:
        if next(thefts, False):
            next(tmp_path.iterdir()).unlink()
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", steal)
    replace(tmp_path / "one", b"1")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"1"]


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    link = tmp_path / "link"
    link.symlink_to("mine")
    with pytest.raises(OSError, match="it is a link"):
        append(link, b"new")
    replace(link, b"new")
    assert (tmp_path / "mine").read_text() == "precious"
    assert (link.read_bytes(), link.is_symlink()) == (b"new", False)
    (tmp_path / "folder").mkdir()
    (tmp_path / "named").symlink_to("folder")  # by the user, who names it
    replace(tmp_path / "named" / "file", b"new")
    append(tmp_path / "named" / "file", b"er")
    assert (tmp_path / "folder" / "file").read_bytes() == b"newer"


def test_files_and_folders_are_their_owners_alone(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Even with a umask of 0."""
    request.addfinalizer(partial(os.umask, os.umask(0)))
    folder = tmp_path / "some" / "folder"
    make_folder(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    replace(folder / "replaced", b"secret")
    append(folder / "appended", b"secret")
    for name in ("replaced", "appended"):
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600
        assert not is_open_to_others(folder / name)
    for mode in (0o640, 0o604, 0o620, 0o602, 0o610):
        (folder / "replaced").chmod(mode)
        assert is_open_to_others(folder / "replaced")
    folder.chmod(0o750)
    make_folder(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o750, "an existing mode stays"


def test_a_file_that_is_too_long_is_not_read_and_another_takes_no_more_memory_than_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "some"
    path.write_bytes(b"12345")
    with at_most(1 << 20):
        assert read_file(path, 5) == read_file(path, 1 << 40) == b"12345"
    with pytest.raises(OSError, match="longer than 4 bytes"):
        read_file(path, 4)
    os.truncate(path, 1 << 40)  # takes no room on the disk
    with at_most(1 << 20), pytest.raises(OSError, match="longer than 1,073,741,824 bytes"):
        read_file(path, 1 << 30)


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zeros").symlink_to("/dev/zero")
    for name in ("pipe", "zeros", "."):
        with pytest.raises(OSError, match="it is not a file"):
            read_file(tmp_path / name, 10)
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "missing", 10)


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


@given(st.text() | st.text("\x1b\x9b\r\n\t\u2028\u202e\ud800\0ab "), st.integers(1, 50))
def test_one_line_is_printable_and_bounded(text: str, most: int) -> None:
    shown = one_line(text, most)
    assert shown.isprintable()
    assert len(shown) <= most
    assert one_line(shown, most) == shown


def test_one_line_keeps_words_apart_and_marks_a_cut() -> None:
    assert one_line("the disk\r\n\tis \x1b[31mfull\x00 – 100 %") == "the disk is [31mfull – 100 %"
    assert one_line("abcdef", 6) == "abcdef"
    assert one_line("abcdefg", 6) == "abcde…"
    assert len(one_line("x" * 1000)) == 300


@given(st.text() | st.text("\x1b\x9b\r\n\t\u2028\0ab "))
def test_the_first_line_of_an_error_is_printable_and_bounded(text: str) -> None:
    assert first_line(ValueError("one\ntwo")) == "one"
    assert first_line(ValueError()) == "ValueError"
    assert first_line(ValueError(text)).isprintable()
    assert len(first_line(ValueError(text * 1_000))) <= 1_000


def test_a_text_of_megabytes_is_cut_before_it_is_looked_at() -> None:
    """Untrusted text can have any length."""
    text = "\x1bx" * 5_000_000
    with at_most(1 << 20):
        assert len(one_line(text)) == 300
