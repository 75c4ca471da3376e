"""A client's marks: which requests it has answered, which nonces it has used, and its privacy budget, over all runs.

The marks belong to the client's identity. They lie beside its private key, are made together with it, and outlive runs,
so that no server can ask the same thing twice under another name.
"""

import math
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec
from msgspec import Meta

from baffle.errors import RefusalError, RunFolderError, unwritable
from baffle.files import own_file, read_file, replace, sync_folder
from baffle.privacy.accounting import Charge, Ledger, Release

Mark = Annotated[int, Meta(ge=-1)]
Hex = Annotated[str, Meta(pattern="^([0-9a-f]{2})*$", max_length=128)]


class Marks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far a client has gone in one run; −1 means not at all."""

    sealed: Mark = -1  # the newest slot that it has sealed shares for
    slot: Mark = -1  # the newest slot that it has computed a vector for
    round: Mark = -1  # the newest round that it has released shares for
    agreed: Mark = -1  # the newest slot whose survivors it has signed
    signed: Mark = -1  # the newest round before which it has signed the state


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="is"):
    pass


class Marked(_Line, frozen=True, tag="marks"):
    """How far the client has gone in a run; `released`: the weights about which it releases shares now."""

    run: Hex
    marks: Marks
    released: Hex = ""


class Entered(_Line, frozen=True, tag="entered"):
    """It takes part in this run, which has `places` places for clients, and no longer in an earlier one."""

    run: Hex
    places: Annotated[int, Meta(ge=0)] = 0


class Left(_Line, frozen=True, tag="left"):
    """The run is over for it."""

    run: Hex


class Committed(_Line, frozen=True, tag="committed"):
    """A nonce that it is about to commit to."""

    commitment: Hex
    nonce: Hex


class Opened(_Line, frozen=True, tag="opened"):
    """The run that it opens a commitment for, and when."""

    commitment: Hex
    run: Hex
    moment: float


class Excluded(_Line, frozen=True, tag="excluded"):
    """A statement was shown to come to nothing because of the client with this identity, at this moment."""

    identity: Hex
    moment: float


class Charged(_Line, frozen=True, tag="charged"):
    """It is about to send `count` vectors of a private run, with this sensitivity and noise."""

    delta_2: Annotated[int, Meta(ge=0, le=2**31)]
    delta_1: Annotated[int, Meta(ge=0, le=2**62)]
    mu: Annotated[float, Meta(ge=1e-30, le=2.0**60)]
    count: Annotated[int, Meta(ge=1, le=2**62)] = 1


Line = Charged | Marked | Entered | Left | Committed | Opened | Excluded


MOST_BYTES = 1 << 30
"""The largest file of marks that is read. Lines are added only if they change something: about half a kilobyte in a
round, at most as many rounds as a run has, and at most eight statements a day that lead to no round, and one for each
client of the roster. Whenever the file
has doubled, it is written anew without what later lines have replaced; then it grows by about 150 bytes for each sum
that this client has helped to unmask, and 400 for each statement that it has agreed to, in all its life."""
LEAST_FOLDED = 1 << 20  # a smaller file is not written anew
MOST_FRUITLESS, DAY = 8, 24 * 3600.0
"""How many statements without a round a client opens its nonces for in one day. A server that could try more could
choose the salt. It is one more for each other client that was shown not to have opened its nonce that day: otherwise
one such client could stop a federation."""


class Memory:
    """A client's marks, in memory. That is enough for a simulation, whose clients end with the server."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._marks: dict[bytes, Marks] = {}
        self._released: dict[bytes, int] = {}
        self._nonces: dict[bytes, bytes] = {}  # commitment → nonce
        self._opened: dict[bytes, bytes] = {}  # commitment → the run that it was opened for
        self._fruitless: dict[bytes, float] = {}  # run without a round → when a nonce was opened for it
        self._excluded: dict[bytes, float] = {}  # identity → when it last allowed one statement more
        self.run = b""  # the run that this client is in; it never goes back to an earlier one
        self.places = 0  # how many places for clients that run has
        self._left: set[bytes] = set()
        self.ledger = Ledger()  # the privacy budget that this client has spent in all private runs together

    # Rounds

    def marks(self, run: bytes) -> Marks:
        """How far this client has gone in a run."""
        return self._marks.get(run, Marks())

    def released(self, weights_hash: bytes) -> int:
        """In how many rounds, of any run, this client has helped to unmask a sum about these weights."""
        return self._released.get(weights_hash, 0)

    def remember(self, run: bytes, marks: Marks, released: bytes = b"") -> None:
        """Note how far this client has gone in a run, and that it releases shares of a sum about these weights. Marks
        that it has already are not written: a server can ask for the same thing any number of times."""
        if released or marks != self.marks(run):
            self._add(Marked(run.hex(), marks, released.hex()))

    def charge(self, charge: Charge) -> None:
        """Pay for a vector before it is computed, even if its sum fails. Refuses if the budget is spent."""
        self.ledger.require(charge)
        release = charge.release
        self._add(Charged(release.delta_2, release.delta_1, release.mu))

    # Runs

    def enter(self, run: bytes, places: int = 0) -> None:
        """Take part in a run, and in no earlier one from now on."""
        if run in self._left:
            raise RefusalError("this client has left that run for another, and takes part in one run at a time")
        if run != self.run:
            self._add(Entered(run.hex(), places))

    def leave(self) -> None:
        """Note that this client's run is over."""
        if self.run:
            self._add(Left(self.run.hex()))

    # Nonces

    def commit(self, commitment: bytes, nonce: bytes) -> None:
        """Keep a nonce, before its commitment is sent."""
        self._add(Committed(commitment.hex(), nonce.hex()))

    def unopened(self) -> bytes | None:
        """A commitment that has not been opened for any run yet."""
        return next((commitment for commitment in self._nonces if commitment not in self._opened), None)

    def open(self, commitment: bytes, run: bytes, *, limited: bool = True, excluded: Iterable[bytes] = ()) -> bytes:
        """The nonce behind a commitment, for one run only. Raises a RefusalError for another run and, if `limited`,
        when too many statements have led to no round. Each identity that is `excluded` allows one more a day."""
        if commitment not in self._nonces:
            raise RefusalError("a commitment that this client has not made")
        opened_for = self._opened.get(commitment)
        if opened_for not in (None, run):
            raise RefusalError("this client's nonce has been used for another statement")
        if opened_for is None:
            if limited:
                self._require_fruitful(excluded)
            self._add(Opened(commitment.hex(), run.hex(), self._now()))
        return self._nonces[commitment]

    def _require_fruitful(self, excluded: Iterable[bytes]) -> None:
        for identity in excluded:
            if not self._of_today(self._excluded.get(identity, -math.inf)):
                self._add(Excluded(identity.hex(), self._now()))
        recent = sum(map(self._of_today, self._fruitless.values()))
        if recent >= MOST_FRUITLESS + sum(map(self._of_today, self._excluded.values())):
            raise RefusalError(
                f"{recent} statements of the last day have led to no round; a server that tries so many may be "
                "trying to choose the salt: this client takes part again tomorrow"
            )

    def _of_today(self, moment: float) -> bool:
        return abs(self._now() - moment) < DAY

    # Lines

    def _add(self, line: Line) -> None:
        self._write(line)
        self._take(line)

    def _write(self, line: Line) -> None:
        """Make a line durable before it counts."""

    def _take(self, line: Line) -> None:
        match line:
            case Marked(run=run, marks=marks, released=released):
                if run:
                    self._marks[bytes.fromhex(run)] = marks
                if marks.round >= 0:  # its statement has led to a sum
                    self._fruitless.pop(bytes.fromhex(run), None)
                if released:
                    self._released[bytes.fromhex(released)] = self.released(bytes.fromhex(released)) + 1
            case Charged(delta_2=delta_2, delta_1=delta_1, mu=mu, count=count):
                self.ledger.add(Release(delta_2, delta_1, mu, count))
            case Entered(run=run, places=places):
                self._left |= {self.run} - {b""}
                self.run, self.places = bytes.fromhex(run), places
            case Left(run=run):
                self._left.add(bytes.fromhex(run))
                self.run, self.places = b"", 0
            case Committed(commitment=commitment, nonce=nonce):
                self._nonces[bytes.fromhex(commitment)] = bytes.fromhex(nonce)
            case Opened(commitment=commitment, run=run, moment=moment):
                self._opened[bytes.fromhex(commitment)] = bytes.fromhex(run)
                if self.marks(bytes.fromhex(run)).round < 0:
                    self._fruitless.setdefault(bytes.fromhex(run), moment)
            case Excluded(identity=identity, moment=moment):
                self._excluded[bytes.fromhex(identity)] = moment

    def lines(self) -> list[Line]:
        """Everything that this memory holds, as lines for `take_over`."""
        held: list[Line] = [Marked(run.hex(), marks, "") for run, marks in self._marks.items()]
        held += [Marked("", Marks(), weights.hex()) for weights, count in self._released.items() for _ in range(count)]
        held += [Committed(commitment.hex(), nonce.hex()) for commitment, nonce in self._nonces.items()]
        held += [
            Opened(commitment.hex(), run.hex(), self._fruitless.get(run, 0.0))
            for commitment, run in self._opened.items()
        ]
        held += [Excluded(identity.hex(), moment) for identity, moment in self._excluded.items()]
        held += [Charged(paid.delta_2, paid.delta_1, paid.mu, paid.count) for paid in self.ledger.releases()]
        held += [Left(run.hex()) for run in self._left]
        return [*held, *([Entered(self.run.hex(), self.places)] if self.run else [])]

    def take_over(self, lines: list[Line]) -> None:
        """Continue from what another memory held, if this one holds nothing."""
        for line in lines:
            self._take(line)


class MarksFile(Memory):
    """Marks on disk: one line for each change, durable before anything that it guards is sent.

    A broken last line is dropped. It is left when a client was killed while writing or its disk was full, and then the
    client has not sent anything that this line would guard.
    """

    def __init__(self, path: Path, now: Callable[[], float] = time.time) -> None:
        super().__init__(now)
        self._path = path
        try:
            data = read_file(path, MOST_BYTES)
            *lines, rest = data.split(b"\n")
            known = [msgspec.json.decode(line, type=Line) for line in lines]
        except FileNotFoundError:
            raise RunFolderError(
                f"{path} is missing: it was made together with this client's key, and without it the client could be "
                "asked twice; put it back, or ask for a new key"
            ) from None
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as fault:
            raise RunFolderError(
                f"{path} cannot be read: {fault}; without its marks this client could be asked twice, so it must join "
                "as a new client, with a new key"
            ) from None
        self._size = self._folded = len(data) - len(rest)
        self._torn = rest  # what may stand behind the last whole line: the beginning of one that was not finished
        for line in known:
            self._take(line)

    def take_over(self, lines: list[Line]) -> None:
        """Ignore the lines: the file takes precedence."""

    def _write(self, line: Line) -> None:
        data = msgspec.json.encode(line) + b"\n"
        try:
            if self._size > max(LEAST_FOLDED, 2 * self._folded):
                with self._path.open("rb") as file:
                    self._require_ours(file)
                self._fold()
            with open(self._path, "r+b", opener=own_file) as file:
                self._require_ours(file)
                self._torn = data
                file.truncate(self._size)
                file.seek(self._size)
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError as fault:
            raise unwritable(self._path, fault, "this client takes no part until it can") from None
        self._size, self._torn = self._size + len(data), b""

    def _require_ours(self, file: BinaryIO) -> None:
        """Refuse to go on if the file is not as this process left it: whoever wrote to it has answered questions that
        this process knows nothing of, and its marks would be lost."""
        written = os.fstat(file.fileno()).st_size - self._size
        file.seek(self._size)
        if not 0 <= written <= len(self._torn) or not self._torn.startswith(file.read(written)):
            raise RefusalError(
                f"{self._path} has been changed by another process or put back from a copy; no two processes may use "
                "one key: stop the other one, then start this client again"
            )

    def _fold(self) -> None:
        """Write the file anew, as few lines that hold the same. Its name is durable before another line is added: after
        a crash, the old file must not come back without that line."""
        data = b"".join(msgspec.json.encode(line) + b"\n" for line in self.lines())
        replace(self._path, data)
        sync_folder(self._path.parent)
        self._size, self._folded, self._torn = len(data), len(data), b""
