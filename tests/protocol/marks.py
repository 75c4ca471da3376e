"""What a client must never forget: lines of JSON beside its key, durable before anything that they guard is sent."""

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from math import inf
from pathlib import Path
from typing import Any

from tests.protocol.wire import require

DAY, MOST_FRUITLESS, MOST_RELEASES = 24 * 3600.0, 8, 3
NONE = {"sealed": -1, "slot": -1, "round": -1, "agreed": -1, "signed": -1}


def write_durably(path: Path, data: bytes, mode: str) -> Path:
    with path.open(mode) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return path


class Marks:
    def __init__(self, path: Path, now: Callable[[], float] = time.time) -> None:
        self._path, self._now = path, now
        self.rounds: dict[str, dict[str, int]] = {}  # run → how far this client has gone in it
        self.released: Counter[str] = Counter()  # hash of weights → how often shares were released about them
        self.nonces: dict[str, str] = {}  # commitment → nonce
        self.opened: dict[str, str] = {}  # commitment → run
        self.fruitless: dict[str, float] = {}  # run without a released round → when a nonce was opened for it
        self.excluded: dict[str, float] = {}  # identity → when it last allowed one statement more
        self.left: set[str] = set()
        self.run, self.places = "", 0
        *lines, rest = path.read_bytes().split(b"\n")
        for line in lines:
            self._take(json.loads(line))
        if rest:
            os.truncate(path, path.stat().st_size - len(rest))

    def of(self, run: bytes) -> dict[str, int]:
        return NONE | self.rounds.get(run.hex(), {})

    def note(self, run: bytes, released: bytes = b"", **changed: int) -> None:
        if released or self.of(run) | changed != self.of(run):
            self._add({"is": "marks", "run": run.hex(), "marks": self.of(run) | changed, "released": released.hex()})

    def require_fresh(self, run: bytes, about: Any) -> None:
        """Refuse a round that is over, and weights that shares were released about too often."""
        require(about.round > self.of(run)["round"], "a round that is over")
        require(self.released[about.weights_hash.hex()] < MOST_RELEASES, "weights that were asked about too often")

    def commit(self, new: Callable[[], tuple[bytes, bytes]]) -> bytes:
        """A commitment that was never opened: one that is known, or a new one with its nonce."""
        known = next((commitment for commitment in self.nonces if commitment not in self.opened), None)
        if known is None:
            commitment, nonce = new()
            self._add({"is": "committed", "commitment": commitment.hex(), "nonce": nonce.hex()})
            return commitment
        return bytes.fromhex(known)

    def _of_today(self, moments: Iterable[float]) -> int:
        return sum(abs(self._now() - moment) < DAY for moment in moments)

    def open(self, commitment: bytes, run: bytes, *, limited: bool, excluded: Iterable[bytes] = ()) -> bytes:
        """The nonce of a commitment, which serves one run ever. Each excluded identity allows one more run a day."""
        name = commitment.hex()
        require(name in self.nonces, "a commitment that this client has not made")
        require(self.opened.get(name, run.hex()) == run.hex(), "a nonce that was opened for another run")
        if name not in self.opened:
            for identity in excluded if limited else ():
                if not self._of_today([self.excluded.get(identity.hex(), -inf)]):
                    self._add({"is": "excluded", "identity": identity.hex(), "moment": self._now()})
            most = MOST_FRUITLESS + self._of_today(self.excluded.values())
            require(
                not limited or self._of_today(self.fruitless.values()) < most, "too many statements without a round"
            )
            self._add({"is": "opened", "commitment": name, "run": run.hex(), "moment": self._now()})
        return bytes.fromhex(self.nonces[name])

    def enter(self, run: bytes, places: int) -> None:
        require(run.hex() not in self.left, "a run that this client has left")
        if run.hex() != self.run:
            self._add({"is": "entered", "run": run.hex(), "places": places})

    def leave(self) -> None:
        if self.run:
            self._add({"is": "left", "run": self.run})

    def _add(self, line: dict[str, Any]) -> None:
        write_durably(self._path, json.dumps(line, separators=(",", ":")).encode() + b"\n", "ab")
        self._take(line)

    def _take(self, line: dict[str, Any]) -> None:
        run = line.get("run", "")
        match line["is"]:
            case "marks":
                if run:
                    self.rounds[run] = line["marks"]
                if line["marks"].get("round", -1) >= 0:
                    self.fruitless.pop(run, None)
                if line.get("released"):
                    self.released[line["released"]] += 1
            case "committed":
                self.nonces[line["commitment"]] = line["nonce"]
            case "opened":
                self.opened[line["commitment"]] = run
                if self.rounds.get(run, NONE).get("round", -1) < 0:
                    self.fruitless.setdefault(run, line["moment"])
            case "excluded":
                self.excluded[line["identity"]] = line["moment"]
            case "entered":
                self.left |= {self.run} - {""}
                self.run, self.places = run, line.get("places", 0)
            case "left":
                self.left.add(run)
                self.run, self.places = "", 0
            case kind:
                require(kind == "charged", f"marks of a kind {kind!r}")
