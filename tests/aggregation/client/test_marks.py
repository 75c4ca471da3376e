"""What a client never forgets: durable line by line, in every run, so that nothing is served twice."""

import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from baffle.aggregation.client.marks import (
    DAY,
    MOST_FRUITLESS,
    Charged,
    Committed,
    Entered,
    Excluded,
    Left,
    Line,
    Marked,
    Marks,
    MarksFile,
    Memory,
    Opened,
)
from baffle.aggregation.client.session import ClientSession
from baffle.errors import BaffleError, RefusalError, RunFolderError
from baffle.privacy.accounting import Charge, Release
from tests.support.clocks import FakeClock
from tests.support.federation import Federation, about, never
from tests.support.memory import at_most

RUN, OTHER = b"r" * 32, b"o" * 32
CHARGE = Charge(Release(1000, 4472, 2.5e7))
LINES: list[Line] = [
    Committed("c0" * 32, "aa" * 32),
    Opened("c0" * 32, RUN.hex(), 1000.5),
    Entered(RUN.hex()),
    Excluded("1d" * 32, 1000.5),
    Charged(1000, 4472, 2.5e7),
    Marked(RUN.hex(), Marks(sealed=0)),
    Marked(RUN.hex(), Marks(sealed=0, slot=0)),
    Marked(RUN.hex(), Marks(0, 0, 0, 0, 0), "ab" * 32),
    Committed("c1" * 32, "bb" * 32),
    Left(RUN.hex()),
]
"""One line of every kind, as a run leaves them."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A new file of marks."""
    (tmp_path / "marks").touch()
    return tmp_path / "marks"


def written(path: Path, lines: list[Line]) -> None:
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def holds(memory: Memory) -> tuple[object, ...]:
    """Everything that a memory holds."""
    lines = memory.lines()
    return memory.run, sorted(msgspec.json.encode(line) for line in lines if line != Marked("", Marks()))


def after(lines: list[Line]) -> tuple[object, ...]:
    memory = Memory()
    memory.take_over(lines)
    return holds(memory)


def with_file(federation: Federation, path: Path, client: int = 0) -> ClientSession:
    """A client that has just been started and has read its marks."""
    federation.sessions[client] = federation.new_session(client, MarksFile(path))
    return federation.sessions[client]


def new_nonce(memory: Memory) -> bytes:
    """A commitment to a fresh nonce, which is kept."""
    nonce = secrets.token_bytes(32)
    commitment = sha256(nonce).digest()
    memory.commit(commitment, nonce)
    return commitment


# The file


def test_without_its_file_a_client_takes_no_part(tmp_path: Path) -> None:
    """It may have been removed to make the client forget, so none is made in its place."""
    with pytest.raises(RunFolderError, match=r"marks of client 3 is missing.*asked twice.*ask for a new key"):
        MarksFile(tmp_path / "marks of client 3")
    assert not (tmp_path / "marks of client 3").exists()


def test_every_line_is_durable_before_it_counts(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[bytes] = []
    real = os.fsync

    def fsync(file: int) -> None:
        assert holds(memory) == held  # nothing counts yet
        synced.append(path.read_bytes())
        real(file)

    monkeypatch.setattr("os.fsync", fsync)
    memory = MarksFile(path, now=lambda: 1000.5)
    steps: list[Callable[[], object]] = [
        lambda: memory.commit(b"\xc0" * 32, b"\xaa" * 32),
        lambda: memory.open(b"\xc0" * 32, RUN),
        lambda: memory.enter(RUN),
        lambda: memory._add(LINES[3]),
        lambda: memory.charge(Charge(Release(1000, 4472, 2.5e7))),
        lambda: memory.remember(RUN, Marks(sealed=0)),
        lambda: memory.remember(RUN, Marks(sealed=0, slot=0)),
        lambda: memory.remember(RUN, Marks(0, 0, 0, 0, 0), b"\xab" * 32),
        lambda: memory.commit(b"\xc1" * 32, b"\xbb" * 32),
        memory.leave,
    ]
    for count, step in enumerate(steps, 1):
        held = holds(memory)
        step()
        assert path.read_bytes() == synced[-1]
        assert [msgspec.json.decode(line, type=Line) for line in synced[-1].splitlines()] == LINES[:count]
        assert holds(memory) == holds(MarksFile(path)) == after(LINES[:count])
        if count in (2, 3, 10):  # opened, entered, left: the same again changes nothing, and is not written
            step()
            assert len(synced) == count


@pytest.mark.parametrize("folded", [False, True])
def test_two_processes_with_one_file_do_not_overwrite_each_others_marks(
    path: Path, monkeypatch: pytest.MonkeyPatch, *, folded: bool
) -> None:
    """Each would cut off what the other has paid, and spend the budget twice."""
    first, second = MarksFile(path), MarksFile(path)
    first.charge(CHARGE)
    if folded:
        monkeypatch.setattr("baffle.aggregation.client.marks.LEAST_FOLDED", -1)
    with pytest.raises(RefusalError, match="changed by another process or put back from a copy"):
        second.charge(CHARGE)
    assert not second.ledger.releases()
    first.charge(CHARGE)
    (paid,) = MarksFile(path).ledger.releases()
    assert paid.count == 2


def test_a_copy_that_is_put_back_under_a_running_client_stops_it(path: Path) -> None:
    memory = MarksFile(path)
    memory.charge(CHARGE)
    copy = path.read_bytes()
    memory.charge(CHARGE)
    path.write_bytes(copy)
    with pytest.raises(RefusalError, match="put back from a copy"):
        memory.charge(CHARGE)


def test_wherever_the_last_line_is_torn_the_lines_before_it_hold(path: Path) -> None:
    written(path, LINES)
    whole = path.read_bytes()
    ends = [place + 1 for place, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(0, len(whole) + 1, 3):
        path.write_bytes(whole[:cut])
        lines = sum(end <= cut for end in ends)
        again = MarksFile(path)
        assert holds(again) == after(LINES[:lines])
        again.remember(OTHER, Marks(7))
        assert holds(MarksFile(path)) == holds(again)
        assert MarksFile(path).marks(OTHER) == Marks(7)


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b'{"is":"marks","run":"","marks":{"sealed":-2}}',
        b'{"is":"marks","run":"","marks":{"unknown":1}}',
        b'{"is":"marks","run":"abc","marks":{}}',
        b'{"is":"entered","run":"' + b"ab" * 65 + b'"}',
        b'{"is":"forgotten","run":""}',
        b"\xff\xfe\x00",
        b'{"not yet":' + b"[" * 1_000_000,
    ],
    ids=range(8),
)
def test_garbage_before_the_end_is_refused_with_the_files_name(tmp_path: Path, garbage: bytes) -> None:
    path = tmp_path / "marks of client 3"
    written(path, LINES)
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*lines[:3], garbage, *lines[3:]]))
    before = path.read_bytes()
    refusal = r"marks of client 3 cannot be read: .* could be asked twice.*new client"
    with at_most(8 << 20), pytest.raises(RunFolderError, match=refusal):
        MarksFile(path)
    assert path.read_bytes() == before


def test_a_file_that_cannot_be_read_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "marks").mkdir()
    with pytest.raises(RunFolderError, match="marks"):
        MarksFile(tmp_path / "marks")
    (tmp_path / "endless").touch()
    os.truncate(tmp_path / "endless", 1 << 40)
    with at_most(1 << 20), pytest.raises(RunFolderError, match="longer than"):
        MarksFile(tmp_path / "endless")


def test_a_file_takes_over_nothing(path: Path) -> None:
    """What a frozen session held may be old; what is on disk stands."""
    written(path, LINES[:3])
    memory = MarksFile(path)
    memory.take_over(LINES)
    assert holds(memory) == after(LINES[:3])


# Runs, one at a time


@pytest.mark.parametrize("leave", [False, True])
def test_a_client_is_in_one_run_at_a_time_and_never_goes_back(path: Path, leave: bool) -> None:
    memory = MarksFile(path)
    memory.enter(RUN)
    if leave:
        memory.leave()
        assert memory.run == b""
    memory.enter(OTHER)
    for again in (memory, MarksFile(path)):
        assert again.run == OTHER
        with pytest.raises(RefusalError, match="left that run"):
            again.enter(RUN)


# Nonces


def test_a_nonce_serves_one_run_ever(path: Path) -> None:
    memory = MarksFile(path)
    memory.commit(b"c" * 32, b"n" * 32)
    assert memory.unopened() == MarksFile(path).unopened() == b"c" * 32
    assert memory.open(b"c" * 32, RUN) == b"n" * 32
    for again in (memory, MarksFile(path)):
        assert again.unopened() is None
        assert again.open(b"c" * 32, RUN) == b"n" * 32
        with pytest.raises(RefusalError, match="used for another statement"):
            again.open(b"c" * 32, OTHER)
        with pytest.raises(RefusalError, match="has not made"):
            again.open(b"d" * 32, RUN)


@pytest.mark.parametrize("place", ["os.open", "os.fsync"])
def test_a_nonce_is_on_disk_before_it_is_opened_for_a_run(
    path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """A client that is killed after it has shown a nonce must know for which run. With a full disk nothing counts, and
    half a line may be left; later the client goes on."""
    memory = MarksFile(path)
    commitment = new_nonce(memory)
    with monkeypatch.context() as disk:
        disk.setattr(place, Mock(side_effect=OSError(28, "No space left on device")))
        with pytest.raises(BaffleError, match="marks"):
            memory.open(commitment, RUN)
    os.truncate(path, path.stat().st_size - (20 if place == "os.fsync" else 0))
    assert memory.unopened() == commitment
    memory.open(commitment, OTHER)
    with pytest.raises(RefusalError, match="used for another statement"):
        MarksFile(path).open(commitment, RUN)


@pytest.mark.parametrize("restarts", [False, True])
def test_only_so_many_statements_a_day_may_lead_to_no_round(path: Path, restarts: bool) -> None:
    clock = FakeClock(1e9)
    memory = MarksFile(path, clock)
    nonces = list[bytes]()
    for number in range(MOST_FRUITLESS):
        nonces.append(new_nonce(memory))
        memory.open(nonces[-1], number.to_bytes(32, "big"))
        clock.sleep(60)
        memory = MarksFile(path, clock) if restarts else memory
    commitment = new_nonce(memory)
    with pytest.raises(RefusalError, match=f"{MOST_FRUITLESS} statements of the last day have led to no round"):
        memory.open(commitment, RUN)
    assert memory.unopened() == commitment
    assert memory.open(nonces[0], bytes(32))  # given again to its own run
    clock.sleep(-3 * 60)  # a clock that is put back opens nothing
    with pytest.raises(RefusalError, match="last day"):
        memory.open(commitment, RUN)
    clock.time = 1e9 + DAY + 1
    memory.open(commitment, RUN)
    with pytest.raises(RefusalError, match="last day"):
        memory.open(new_nonce(memory), OTHER)


@pytest.mark.parametrize("restarts", [False, True])
def test_each_excluded_client_allows_one_statement_more_a_day(path: Path, restarts: bool) -> None:
    clock = FakeClock(1e9)
    memory = MarksFile(path, clock)

    def opened(number: int, *excluded: bytes) -> None:
        nonlocal memory
        memory = MarksFile(path, clock) if restarts else memory
        memory.open(memory.unopened() or new_nonce(memory), number.to_bytes(32, "big"), excluded=excluded)

    for number in range(MOST_FRUITLESS):
        opened(number)
    opened(100, b"a" * 32)
    for again in ((), (b"a" * 32,)):
        with pytest.raises(RefusalError, match=f"{MOST_FRUITLESS + 1} statements of the last day"):
            opened(101, *again)
    clock.sleep(DAY - 60)
    opened(101, b"b" * 32, b"a" * 32)  # it is not a day yet, and only one of them is new
    with pytest.raises(RefusalError, match="last day"):
        opened(102, b"a" * 32)
    clock.sleep(61)
    for number in range(MOST_FRUITLESS):  # of the last day there is one statement, and one that was shown not to open
        opened(200 + number)
    opened(300, b"a" * 32)
    with pytest.raises(RefusalError, match="last day"):
        opened(301, b"a" * 32, b"b" * 32)
    lines = [msgspec.json.decode(line, type=Line) for line in path.read_bytes().splitlines()]
    assert [line.identity[:2] for line in lines if isinstance(line, Excluded)] == ["61", "62", "61"]


def test_a_statement_that_leads_to_a_sum_does_not_count(path: Path) -> None:
    clock = FakeClock(1e9)
    memory = MarksFile(path, clock)
    for number in range(3 * MOST_FRUITLESS):
        run = number.to_bytes(32, "big")
        memory.open(new_nonce(memory), run)
        memory.remember(run, Marks(0, 0, 0), run)
        memory.open(new_nonce(memory), run)
        memory = MarksFile(path, clock)
    for number in range(MOST_FRUITLESS):
        memory.open(new_nonce(memory), (1000 + number).to_bytes(32, "big"))
    with pytest.raises(RefusalError, match="last day"):
        memory.open(new_nonce(memory), RUN)
    for marks in (Marks(sealed=0), Marks(sealed=0, slot=0), Marks(sealed=0, slot=0, agreed=0, signed=0)):
        memory.remember((1000).to_bytes(32, "big"), marks)
        with pytest.raises(RefusalError, match="last day"):
            memory.open(memory.unopened() or b"", RUN)
    memory.remember((1000).to_bytes(32, "big"), Marks(0, 0, 0, 0, 0), b"w" * 32)
    memory.open(new_nonce(memory), RUN)


def test_marks_that_later_ones_replace_take_no_room(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """N16. However long a client lives, its file stays far below what it can read again."""
    monkeypatch.setattr("baffle.aggregation.client.marks.LEAST_FOLDED", 2_000)
    memory, sizes = MarksFile(path), list[int]()
    for line in LINES[:4]:
        memory._add(line)
    for number in range(300):
        memory.remember(RUN, Marks(sealed=number))
        sizes.append(path.stat().st_size)
        assert holds(MarksFile(path)) == holds(memory)
    assert max(sizes) < 2_500
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(path.parent.iterdir()) == [path]


def test_a_full_disk_keeps_a_file_that_cannot_be_written_anew(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baffle.aggregation.client.marks.LEAST_FOLDED", 100)
    memory = MarksFile(path)
    for line in LINES:
        memory._add(line)
    with monkeypatch.context() as full:
        full.setattr(
            "baffle.aggregation.client.marks.replace", Mock(side_effect=OSError(28, "No space left on device"))
        )
        full.setattr(memory, "_folded", 0)
        before = path.read_bytes()
        with pytest.raises(RunFolderError, match="takes no part until it can"):
            memory.remember(OTHER, Marks(sealed=1))
    assert path.read_bytes() == before
    memory.remember(OTHER, Marks(sealed=1))
    assert MarksFile(path).marks(OTHER) == Marks(sealed=1)


# One law for all of it: whatever has happened, a memory that is rebuilt answers like the one that has lived through it.

NAMES = [bytes([letter]) * 32 for letter in b"abc"]
names = st.sampled_from(NAMES)
marks = st.builds(Marks, *[st.integers(-1, 3)] * 5)
deeds = st.one_of(
    st.tuples(st.just("commit"), names),
    st.tuples(st.just("open"), names, names, st.lists(names, max_size=2)),
    st.tuples(st.just("enter"), names),
    st.tuples(st.just("leave")),
    st.tuples(st.just("remember"), names, marks, st.just(b"") | names),
    st.tuples(st.just("wait")),
)
Deed = tuple[Any, ...]


@dataclass
class Life:
    """A memory, and how it answers to one deed after the other."""

    memory: Memory
    clock: FakeClock

    def do(self, deed: Deed) -> object:
        name, *arguments = deed
        if name == "wait":
            self.clock.sleep(DAY / 3)
            return None
        if name == "commit":
            arguments.append(b"nonce of " + arguments[0])
        excluded = {"excluded": arguments.pop()} if name == "open" else {}
        if name == "remember":  # marks only ever grow
            known = msgspec.structs.astuple(self.memory.marks(arguments[0]))
            arguments[1] = Marks(*map(max, known, msgspec.structs.astuple(arguments[1])))
        try:
            return getattr(self.memory, name)(*arguments, **excluded)
        except RefusalError as fault:
            return str(fault)

    def sight(self) -> object:
        memory = self.memory
        return memory.run, memory.unopened(), [(memory.marks(name), memory.released(name)) for name in NAMES]


@given(st.lists(deeds, max_size=25), st.lists(deeds, max_size=25))
@settings(max_examples=200)
def test_a_memory_that_is_rebuilt_from_its_lines_behaves_the_same(before: list[Deed], later: list[Deed]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("baffle.aggregation.client.marks.MOST_FRUITLESS", 2)
        clock = FakeClock(1e9)
        one = Life(Memory(clock), clock)
        for deed in before:
            one.do(deed)
        other_clock = FakeClock(clock.time)
        other = Life(Memory(other_clock), other_clock)
        other.memory.take_over(one.memory.lines())
        assert other.sight() == one.sight()
        for deed in later:
            assert other.do(deed) == one.do(deed)
            assert other.sight() == one.sight()


@given(st.lists(st.tuples(deeds, st.booleans()), max_size=15), st.integers(0, 60))
@settings(max_examples=60)
def test_a_client_that_is_restarted_again_and_again_remembers_everything(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[Deed, bool]], torn: int
) -> None:
    """With or without a torn last line."""
    path, clock = tmp_path_factory.mktemp("marks") / "marks", FakeClock(1e9)
    path.touch()
    one, other = Life(Memory(clock), clock), Life(MarksFile(path, clock), clock)
    for deed, restarts in steps:
        moment = clock.time
        expected = one.do(deed)
        clock.time = moment
        assert other.do(deed) == expected
        if restarts:
            with path.open("ab") as raw:
                raw.write(msgspec.json.encode(Marked(NAMES[0].hex(), Marks(99, 99, 99)))[:torn])
            other.memory = MarksFile(path, clock)
        assert holds(other.memory) == holds(one.memory)


# In a session


@pytest.mark.parametrize("stage", ["sealed", "computing", "masked", "unmasked"])
def test_a_client_that_restarts_within_a_round_is_out_of_it(path: Path, stage: str) -> None:
    federation = Federation(3)
    with_file(federation, path)
    federation.advertise()
    server = federation.sealed()
    requests = server.requests(dict.fromkeys(federation.everybody, about(0)))
    if stage == "computing":
        with pytest.raises(KeyboardInterrupt):
            federation.sessions[0].mask(requests[0], Mock(side_effect=KeyboardInterrupt))
        assert MarksFile(path).marks(federation.run).slot == 0
    elif stage != "sealed":
        federation.masked(server, requests, federation.everybody)
    if stage == "unmasked":
        federation.sessions[0].unmask(server.unmask())
    session = with_file(federation, path)
    refused: list[Callable[[], object]] = [
        lambda: session.advertise(0),
        lambda: session.seal(federation.opening(0, 0)),
        lambda: session.mask(requests[0], never),
    ]
    if stage in ("masked", "unmasked"):
        refused.append(lambda: session.unmask(server.unmask()))
    for ask in refused:
        with pytest.raises(RefusalError):
            ask()
    federation.advertise(1)
    federation.whole(about(1))
