"""What a client never forgets: durable line by line, in every run, so that nothing is served twice."""

import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from stat import S_IMODE
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baffle.aggregation.client.mark_lines import Charged, Committed, Entered, Left, Line, Marked, Marks, Opened
from baffle.aggregation.client.marks import DAY, MOST_FRUITLESS, MarksFile, Memory, make_marks
from baffle.aggregation.client.refusals import MOST_QUERIES
from baffle.aggregation.client.session import ClientSession
from baffle.errors import BaffleError, RefusalError, RunFolderError
from baffle.privacy.accounting import Release
from baffle.privacy.ledger import Charge
from tests.support.federation import Federation, about, random_vector
from tests.support.memory import at_most
from tests.support.slots import never

RUN, OTHER = b"r" * 32, b"o" * 32
LINES: list[Line] = [
    Committed("c0" * 32, "aa" * 32),
    Opened("c0" * 32, RUN.hex(), 1000.5),
    Entered(RUN.hex()),
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
    make_marks(tmp_path / "marks")
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


def test_a_new_file_is_empty_and_only_its_owners(path: Path) -> None:
    assert path.read_bytes() == b""
    assert S_IMODE(path.stat().st_mode) == 0o600
    assert MarksFile(path).marks(RUN) == Marks()
    assert MarksFile(path).unopened() is None


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


def test_what_changes_nothing_is_not_written(path: Path) -> None:
    memory = MarksFile(path)
    memory.enter(RUN)
    commitment = new_nonce(memory)
    memory.open(commitment, RUN)
    size = path.stat().st_size
    memory.enter(RUN)
    memory.open(commitment, RUN)
    assert path.stat().st_size == size
    memory.leave()
    size = path.stat().st_size
    memory.leave()
    assert path.stat().st_size == size


def test_a_file_grows_by_what_is_new_only(path: Path) -> None:
    memory, sizes = MarksFile(path), []
    for number in range(60):
        memory.remember(RUN, Marks(number, number, number), number.to_bytes(32, "big"))
        sizes.append(path.stat().st_size)
    steps = [b - a for a, b in pairwise(sizes)]
    assert max(steps) < min(steps) + 10
    assert all(MarksFile(path).released(n.to_bytes(32, "big")) == 1 for n in range(60))


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
        b"{}x",
        b"{}",
        b"garbage",
        b'{"is":"marks","run":"","marks":{"sealed":-2}}',
        b'{"is":"marks","run":"","marks":{"sealed":"0"}}',
        b'{"is":"marks","run":"","marks":{"unknown":1}}',
        b'{"is":"marks","run":"zz","marks":{}}',
        b'{"is":"marks","run":"abc","marks":{}}',
        b'{"is":"entered","run":"' + b"ab" * 65 + b'"}',
        b'{"is":"entered"}',
        b'{"is":"opened","commitment":"","run":""}',
        b'{"is":"forgotten","run":""}',
        b'{"is":"left","run":"\xff\xfe"}',
        b"\xff\xfe\x00",
        bytes(50),
        b"[" * 100_000,
        b"null",
    ],
    ids=range(18),
)
@pytest.mark.parametrize("at", [0, 3])
def test_garbage_before_the_end_is_refused_with_the_files_name(tmp_path: Path, garbage: bytes, at: int) -> None:
    path = tmp_path / "marks of client 3"
    written(path, LINES)
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*lines[:at], garbage, *lines[at:]]))
    before = path.read_bytes()
    with pytest.raises(RunFolderError, match="marks of client 3") as refused:
        MarksFile(path)
    assert "new client" in str(refused.value)
    assert path.read_bytes() == before


def test_a_file_that_cannot_be_read_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "marks").mkdir()
    with pytest.raises(RunFolderError, match="marks"):
        MarksFile(tmp_path / "marks")


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 1_000_000,
        b'{"not yet":' + b"[" * 1_000_000,
        b"\xff",
        b"null",
        b'{"is":"marks","run":"","marks":{"sealed":1e300}}',
        b'{"is":"opened","commitment":"","run":"","moment":"now"}',
    ],
    ids=range(6),
)
def test_hostile_marks_are_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content + b"\n")
    with at_most(8 << 20), pytest.raises(RunFolderError, match=r"marks cannot be read: .* could be asked twice"):
        MarksFile(path)


def test_marks_that_never_end_are_not_read(path: Path) -> None:
    os.truncate(path, 1 << 40)
    with at_most(1 << 20), pytest.raises(RunFolderError, match="longer than"):
        MarksFile(path)


def test_a_file_takes_over_nothing(path: Path) -> None:
    """What a frozen session held may be old; what is on disk stands."""
    written(path, LINES[:3])
    memory = MarksFile(path)
    memory.take_over(LINES)
    assert holds(memory) == after(LINES[:3])


# Runs, one at a time


def test_a_client_is_in_one_run_at_a_time_and_never_goes_back(path: Path) -> None:
    memory = MarksFile(path)
    memory.enter(RUN)
    memory.enter(OTHER)
    for again in (memory, MarksFile(path)):
        assert again.run == OTHER
        with pytest.raises(RefusalError, match="left that run"):
            again.enter(RUN)
        again.enter(OTHER)
        assert again.run == OTHER


def test_a_run_that_is_over_is_not_entered_again(path: Path) -> None:
    memory = MarksFile(path)
    memory.enter(RUN)
    memory.leave()
    for again in (memory, MarksFile(path)):
        assert again.run == b""
        with pytest.raises(RefusalError, match="left that run"):
            again.enter(RUN)
    memory.enter(OTHER)
    assert MarksFile(path).run == OTHER


def test_marks_belong_to_a_run_and_releases_to_weights_in_any_run(path: Path) -> None:
    memory, weights = MarksFile(path), b"w" * 32
    memory.remember(RUN, Marks(3, 3, 3), weights)
    memory.remember(OTHER, Marks(0), b"v" * 32)
    memory.remember(OTHER, Marks(0, 0, 0), weights)
    for again in (memory, MarksFile(path)):
        assert again.marks(RUN) == Marks(3, 3, 3)
        assert again.marks(OTHER) == Marks(0, 0, 0)
        assert again.marks(b"x" * 32) == Marks()
        assert (again.released(weights), again.released(b"v" * 32), again.released(b"u" * 32)) == (2, 1, 0)


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


def test_a_nonce_is_on_disk_before_it_is_opened_for_a_run(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that is killed after it has shown a nonce must know for which run."""
    memory = MarksFile(path)
    commitment = new_nonce(memory)
    disk = Disk(monkeypatch)
    disk.how = "sync"
    with pytest.raises(BaffleError, match="marks"):
        memory.open(commitment, RUN)
    disk.how = ""
    assert memory.unopened() == commitment
    memory.open(commitment, OTHER)
    with pytest.raises(RefusalError, match="used for another statement"):
        memory.open(commitment, RUN)


class Clock:
    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("restarts", [False, True])
def test_only_so_many_statements_a_day_may_lead_to_no_round(path: Path, restarts: bool) -> None:
    clock = Clock()
    memory = MarksFile(path, clock)
    for number in range(MOST_FRUITLESS):
        memory.open(new_nonce(memory), number.to_bytes(32, "big"))
        clock.now += 60
        memory = MarksFile(path, clock) if restarts else memory
    commitment = new_nonce(memory)
    with pytest.raises(RefusalError, match=f"{MOST_FRUITLESS} statements of the last day have led to no round"):
        memory.open(commitment, RUN)
    assert memory.unopened() == commitment
    clock.now -= 3 * 60  # a clock that is put back opens nothing
    with pytest.raises(RefusalError, match="last day"):
        memory.open(commitment, RUN)
    clock.now = 1e9 + DAY + 1
    memory.open(commitment, RUN)
    with pytest.raises(RefusalError, match="last day"):
        memory.open(new_nonce(memory), OTHER)


def test_a_statement_that_leads_to_a_sum_does_not_count(path: Path) -> None:
    clock = Clock()
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


def test_the_nonce_of_a_run_is_given_again_even_after_too_many_statements() -> None:
    memory = Memory()
    commitments = [new_nonce(memory) for _ in range(MOST_FRUITLESS)]
    for number, commitment in enumerate(commitments):
        memory.open(commitment, number.to_bytes(32, "big"))
    assert memory.open(commitments[0], bytes(32))


# One law for all of it: whatever has happened, a memory that is rebuilt answers like the one that has lived through it.

NAMES = [bytes([letter]) * 32 for letter in b"abc"]
names = st.sampled_from(NAMES)
marks = st.builds(Marks, *[st.integers(-1, 3)] * 5)
deeds = st.one_of(
    st.tuples(st.just("commit"), names),
    st.tuples(st.just("open"), names, names),
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
    clock: Clock = field(default_factory=Clock)

    def do(self, deed: Deed) -> object:
        name, *arguments = deed
        if name == "wait":
            self.clock.now += DAY / 3
            return None
        if name == "commit":
            arguments.append(b"nonce of " + arguments[0])
        if name == "remember":  # marks only ever grow
            known = msgspec.structs.astuple(self.memory.marks(arguments[0]))
            arguments[1] = Marks(*map(max, known, msgspec.structs.astuple(arguments[1])))
        try:
            return getattr(self.memory, name)(*arguments)
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
        clock = Clock()
        one = Life(Memory(clock), clock)
        for deed in before:
            one.do(deed)
        other_clock = Clock()
        other_clock.now = clock.now
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
    path, clock = tmp_path_factory.mktemp("marks") / "marks", Clock()
    make_marks(path)
    one, other = Life(Memory(clock), clock), Life(MarksFile(path, clock), clock)
    for deed, restarts in steps:
        moment = clock.now
        expected = one.do(deed)
        clock.now = moment
        assert other.do(deed) == expected
        if restarts:
            with path.open("ab") as raw:
                raw.write(msgspec.json.encode(Marked(NAMES[0].hex(), Marks(99, 99, 99)))[:torn])
            other.memory = MarksFile(path, clock)
        assert holds(other.memory) == holds(one.memory)


# In a session


def test_a_restarted_client_refuses_all_that_it_had_served(path: Path) -> None:
    federation, same = Federation(3), secrets.token_bytes(32)
    session = with_file(federation, path)
    federation.advertise()
    for number in range(MOST_QUERIES):
        federation.whole(about(number, weights_hash=same))
    federation.whole(about(MOST_QUERIES))
    last = MOST_QUERIES
    session = with_file(federation, path)
    for slot in range(last + 1):
        with pytest.raises(RefusalError, match="not after slot"):
            session.advertise(slot)
        with pytest.raises(RefusalError, match="not after slot"):
            session.seal(federation.opening(slot, 0))
    federation.advertise(last + 1)
    server = federation.sealed(last + 1)
    refused = {
        "not opened": about(last),
        f"asked about {MOST_QUERIES} times": about(last + 1, weights_hash=same),
    }
    for why, request in refused.items():
        asked = server.requests(dict.fromkeys(federation.everybody, request))[0]
        with pytest.raises(RefusalError, match=why):
            session.mask(asked, never)
    requests = server.requests(dict.fromkeys(federation.everybody, about(last + 1)))
    session.mask(requests[0], random_vector)


@pytest.mark.parametrize("stage", ["sealed", "computing", "masked", "unmasked"])
def test_a_client_that_restarts_within_a_round_is_out_of_it(path: Path, stage: str) -> None:
    federation = Federation(3)
    with_file(federation, path)
    federation.advertise()
    server = federation.sealed()
    requests = server.requests(dict.fromkeys(federation.everybody, about(0)))
    if stage == "computing":
        with pytest.raises(KeyboardInterrupt):
            federation.sessions[0].mask(requests[0], killed)
        assert MarksFile(path).marks(federation.run).slot == 0
    elif stage != "sealed":
        federation.masked(server, requests, federation.everybody)
    if stage == "unmasked":
        federation.sessions[0].unmask(server.unmask())
    session = with_file(federation, path)
    with pytest.raises(RefusalError):
        session.advertise(0)
    with pytest.raises(RefusalError):
        session.seal(federation.opening(0, 0))
    with pytest.raises(RefusalError):
        session.mask(requests[0], never)
    if stage in ("masked", "unmasked"):
        with pytest.raises(RefusalError):
            session.unmask(server.unmask())
    federation.advertise(1)
    federation.whole(about(1))


def killed() -> Any:
    raise KeyboardInterrupt


def test_two_runs_share_one_file_and_count_for_themselves(path: Path) -> None:
    one, other = Federation(3), Federation(3)
    memory = MarksFile(path)
    for federation in (one, other):
        federation.sessions[0] = federation.new_session(0, memory)
        federation.advertise()
    one.whole(about(0))
    other.whole(about(0))
    one.whole(about(1))
    again = MarksFile(path)
    assert (again.marks(one.run).round, again.marks(other.run).round) == (1, 0)
    assert again.released(about(0).weights_hash) == 2
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
def test_with_a_full_disk_nothing_is_computed_or_sent_and_the_client_goes_on_later(
    path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    federation = Federation(3)
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
        session.mask(requests[0], never)
    disk.how = ""
    federation.masked(server, requests, federation.everybody)
    disk.how = how
    with pytest.raises(BaffleError, match="marks"):
        session.unmask(server.unmask())
    disk.how = ""
    session.unmask(server.unmask())
    assert MarksFile(path).marks(federation.run) == Marks(0, 0, 0)
    assert MarksFile(path).released(about(0).weights_hash) == 1
