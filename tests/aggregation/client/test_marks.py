"""What a client remembers across restarts: durable line by line, so that nothing is served twice."""

import os
import secrets
import stat
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baffle.aggregation.client.marks import Marks, MarksFile
from baffle.aggregation.client.refusals import MOST_QUERIES
from baffle.aggregation.client.session import ClientSession
from baffle.errors import BaffleError, RefusalError, RunFolderError
from tests.support.federation import Federation, about, random_vector
from tests.support.memory import at_most
from tests.support.slots import never

STEPS = [
    Marks(sealed=0),
    Marks(sealed=0, slot=0),
    Marks(0, 0, 0, {"ab": (0,)}),
    Marks(sealed=1, slot=0, round=0, released={"ab": (0,)}),
    Marks(1, 1, 1, {"ab": (0,), "cd": (1,)}),
    Marks(2, 2, 2, {"ab": (0, 2), "cd": (1,)}),
]


def with_file(federation: Federation, path: Path, client: int = 0) -> ClientSession:
    """A client that has just been started and has read its marks."""
    file = MarksFile(path)
    federation.sessions[client] = federation.new_session(client, file.marks, file.remember)
    return federation.sessions[client]


def test_no_file_means_no_marks(tmp_path: Path) -> None:
    assert MarksFile(tmp_path / "marks").marks == Marks()
    assert not (tmp_path / "marks").exists()


def test_every_line_is_durable_when_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[bytes] = []
    path, real = tmp_path / "marks", os.fsync

    def fsync(file: int) -> None:
        synced.append(path.read_bytes())
        real(file)

    monkeypatch.setattr("os.fsync", fsync)
    file = MarksFile(path)
    for count, marks in enumerate(STEPS, 1):
        file.remember(marks)
        assert file.marks == marks
        assert MarksFile(path).marks == marks
        assert path.read_bytes() in synced
        assert path.read_bytes().count(b"\n") == count


def test_a_file_grows_by_what_is_new_only(tmp_path: Path) -> None:
    file, sizes = MarksFile(tmp_path / "marks"), []
    for number in range(60):
        released = {f"{n:064x}": (n,) for n in range(number + 1)}
        file.remember(Marks(number, number, number, released))
        sizes.append((tmp_path / "marks").stat().st_size)
    steps = [b - a for a, b in pairwise(sizes)]
    assert max(steps) < min(steps) + 10
    assert MarksFile(tmp_path / "marks").marks.released == {f"{n:064x}": (n,) for n in range(60)}


def test_wherever_the_last_line_is_torn_the_marks_before_it_hold(tmp_path: Path) -> None:
    path = tmp_path / "marks"
    file, ends = MarksFile(path), [0]
    for marks in STEPS:
        file.remember(marks)
        ends.append(path.stat().st_size)
    whole = path.read_bytes()
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        lines = sum(end <= cut for end in ends) - 1
        expected = STEPS[lines - 1] if lines else Marks()
        again = MarksFile(path)
        assert again.marks == expected
        again.remember(STEPS[-1])
        assert MarksFile(path).marks == STEPS[-1]


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"{}x",
        b"garbage",
        b'{"sealed": -2}',
        b'{"sealed": "0"}',
        b'{"unknown": 1}',
        b'{"released": {"ab": 1}}',
        b"\xff\xfe\x00",
        bytes(50),
        b"[" * 100_000,
        b"null",
    ],
    ids=range(11),
)
@pytest.mark.parametrize("at", [0, 3])
def test_garbage_before_the_end_is_refused_with_the_files_name(tmp_path: Path, garbage: bytes, at: int) -> None:
    path = tmp_path / "marks of client 3"
    file = MarksFile(path)
    for marks in STEPS:
        file.remember(marks)
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*lines[:at], garbage, *lines[at:]]))
    before = path.read_bytes()
    with pytest.raises(RunFolderError, match="marks of client 3") as refused:
        MarksFile(path)
    assert "new client" in str(refused.value)
    assert path.read_bytes() == before


def test_text_that_is_not_text_is_refused_with_the_files_name(tmp_path: Path) -> None:
    path = tmp_path / "marks"
    path.write_bytes(b'{"sealed":0,"released":{"\xff\xfe":[0]}}\n' + msgspec.json.encode(STEPS[-1]) + b"\n")
    with pytest.raises(RunFolderError, match="marks"):
        MarksFile(path)


def test_a_file_that_cannot_be_read_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "marks").mkdir()
    with pytest.raises(RunFolderError, match="marks"):
        MarksFile(tmp_path / "marks")


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=12), st.integers(0, 200))
@settings(max_examples=40)
def test_what_is_read_is_what_was_remembered_last(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, bool]], torn: int
) -> None:
    """Again and again a client goes on, or is restarted from its file, with or without a torn last line."""
    path = tmp_path_factory.mktemp("marks") / "marks"
    file, marks = MarksFile(path), Marks()
    for number, (weights, restarts) in enumerate(steps):
        rounds = (*marks.released.get(str(weights), ()), number)
        marks = Marks(number, number, number, {**marks.released, str(weights): rounds})
        file.remember(marks)
        if restarts:
            with path.open("ab") as raw:
                raw.write(msgspec.json.encode(Marks(99, 99, 99, {}))[:torn])
            file = MarksFile(path)
        assert file.marks == marks
    assert MarksFile(path).marks == marks


def test_a_restarted_client_refuses_all_that_it_had_served(tmp_path: Path) -> None:
    federation, same = Federation(3), secrets.token_bytes(32)
    session = with_file(federation, tmp_path / "marks")
    federation.advertise()
    for number in range(MOST_QUERIES):
        federation.whole(about(number, weights_hash=same, skipped=range(number)))
    federation.whole(about(MOST_QUERIES))
    last = MOST_QUERIES
    session = with_file(federation, tmp_path / "marks")
    for slot in range(last + 1):
        with pytest.raises(RefusalError, match="not after slot"):
            session.advertise(slot)
        with pytest.raises(RefusalError, match="not after slot"):
            session.seal(federation.opening(slot, 0))
    federation.advertise(last + 1)
    server = federation.sealed(last + 1)
    refused = {
        "not opened": about(last),
        "which was not skipped": about(last + 1, weights_hash=same),
        f"asked about {MOST_QUERIES} times": about(last + 1, weights_hash=same, skipped=range(last + 1)),
    }
    for why, request in refused.items():
        asked = server.requests(dict.fromkeys(federation.everybody, request))[0]
        with pytest.raises(RefusalError, match=why):
            session.mask(asked, never)
    requests = server.requests(dict.fromkeys(federation.everybody, about(last + 1)))
    session.mask(requests[0], random_vector)


@pytest.mark.parametrize("stage", ["sealed", "masked", "unmasked"])
def test_a_client_that_restarts_within_a_round_is_out_of_it(tmp_path: Path, stage: str) -> None:
    federation = Federation(3)
    with_file(federation, tmp_path / "marks")
    federation.advertise()
    server = federation.sealed()
    requests = server.requests(dict.fromkeys(federation.everybody, about(0)))
    if stage != "sealed":
        federation.masked(server, requests, federation.everybody)
    if stage == "unmasked":
        federation.sessions[0].unmask(server.unmask())
    session = with_file(federation, tmp_path / "marks")
    with pytest.raises(RefusalError):
        session.advertise(0)
    with pytest.raises(RefusalError):
        session.seal(federation.opening(0, 0))
    with pytest.raises(RefusalError):
        session.mask(requests[0], never)
    if stage != "sealed":
        with pytest.raises(RefusalError):
            session.unmask(server.unmask())
    federation.advertise(1)
    federation.whole(about(1))


def test_two_runs_have_two_files(tmp_path: Path) -> None:
    one, other = Federation(3), Federation(3)
    for federation, name in ((one, "one"), (other, "other")):
        with_file(federation, tmp_path / name)
        federation.advertise()
    one.whole(about(0))
    other.whole(about(0))
    one.whole(about(1))
    assert MarksFile(tmp_path / "one").marks.round == 1
    assert MarksFile(tmp_path / "other").marks.round == 0
    other.whole(about(1))


class Disk:
    """A disk that can be full: it then writes nothing, or part of a line, or a line that does not become durable."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.how = ""
        real_open, real_sync, disk = Path.open, os.fsync, self

        class File:
            def __init__(self, file: Any) -> None:
                self.file = file

            def __enter__(self) -> "File":
                return self

            def __exit__(self, *_: object) -> None:
                self.file.close()

            def __getattr__(self, name: str) -> Any:
                return getattr(self.file, name)

            def write(self, data: bytes) -> None:
                if disk.how == "torn":
                    self.file.write(data[: len(data) // 2])
                    self.file.flush()
                    raise OSError(28, "No space left on device")
                self.file.write(data)

        def writes(mode: str) -> bool:
            return bool(set(mode) & set("aw+"))

        def opened(path: Path, mode: str = "r", *rest: Any, **options: Any) -> Any:
            if writes(mode) and disk.how == "open":
                raise OSError(28, "No space left on device")
            file = real_open(path, mode, *rest, **options)
            return File(file) if writes(mode) else file

        def synced(file: int) -> None:
            if disk.how == "sync":
                raise OSError(28, "No space left on device")
            real_sync(file)

        monkeypatch.setattr(Path, "open", opened)
        monkeypatch.setattr("os.fsync", synced)


@pytest.mark.parametrize("how", ["open", "sync", "torn"])
def test_with_a_full_disk_nothing_is_sent_and_the_client_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    federation, path = Federation(3), tmp_path / "marks"
    session, disk = with_file(federation, path), Disk(monkeypatch)
    federation.advertise()
    disk.how = how
    with pytest.raises(BaffleError, match="marks"):
        session.seal(federation.opening(0, 0))
    disk.how = ""
    server = federation.sealed()
    requests = server.requests(dict.fromkeys(federation.everybody, about(0)))
    disk.how = how
    with pytest.raises(BaffleError, match="marks"):
        session.mask(requests[0], random_vector)
    disk.how = ""
    federation.masked(server, requests, federation.everybody)
    disk.how = how
    with pytest.raises(BaffleError, match="marks"):
        session.unmask(server.unmask())
    disk.how = ""
    session.unmask(server.unmask())
    assert MarksFile(path).marks == Marks(0, 0, 0, {about(0).weights_hash.hex(): (0,)})


def test_marks_are_their_owners_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    MarksFile(tmp_path / "marks").remember(STEPS[0])
    os.umask(before)
    assert stat.S_IMODE((tmp_path / "marks").stat().st_mode) == 0o600


@pytest.mark.parametrize("content", [b"[" * 1_000_000 + b"\n", b"\xff\n", b"null\n", b'{"sealed": 1e300}\n'])
def test_hostile_marks_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "marks").write_bytes(content)
    with at_most(8 << 20), pytest.raises(RunFolderError, match=r"marks cannot be read: .* could be asked twice"):
        MarksFile(tmp_path / "marks")


def test_marks_that_never_end_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "marks").touch()
    os.truncate(tmp_path / "marks", 1 << 40)
    with at_most(1 << 20), pytest.raises(RunFolderError, match="longer than"):
        MarksFile(tmp_path / "marks")
