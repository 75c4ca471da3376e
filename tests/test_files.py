"""A file is replaced whole or not at all."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baffle.files import replace


@given(st.lists(st.binary(max_size=100), min_size=1))
def test_a_file_holds_what_was_written_last(tmp_path_factory: pytest.TempPathFactory, contents: list[bytes]) -> None:
    path = tmp_path_factory.mktemp("files") / "some.json"
    for content in contents:
        replace(path, content)
        assert path.read_bytes() == content
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("step", ["open", "fsync", "rename"])
def test_when_it_fails_the_old_content_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    path = tmp_path / "some.json"
    replace(path, b"old")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as broken:
        owner = os if step == "fsync" else Path
        broken.setattr(owner, {"open": "open", "fsync": "fsync", "rename": "replace"}[step], full)
        with pytest.raises(OSError, match="No space"):
            replace(path, b"new and longer")
    assert path.read_bytes() == b"old"
    replace(path, b"new and longer")  # what the failure left behind is in nobody's way
    assert path.read_bytes() == b"new and longer"
