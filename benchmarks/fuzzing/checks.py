"""What must hold whatever was sent: nothing but our own errors, soon, and no change by what was refused."""

import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeVar, cast

import msgspec
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from baffle.aggregation.client.marks import Marks
from baffle.aggregation.client_policy import ClientPolicy, Slot
from baffle.client.worker import Worker
from baffle.core.state import Present
from baffle.errors import BaffleError, first_line
from baffle.lineage import Lineage
from baffle.network.keys.folders import ClientKeys
from baffle.network.member.consent import AcceptedEpoch
from baffle.trajectory import Trajectory

ACCEPTED, REFUSED, VIOLATION = "accepted", "refused", "VIOLATION"

CACHES = {"_channels", "_near", "_private_keys", "_weights", "_ranks", "_equipped", "_seen", "tell", "_tell_sparingly"}
"""Attributes that only save work or tell people something, and may change at any time."""

NEVER_CHANGE = (
    msgspec.Struct, Marks, ClientPolicy, Slot, Worker, Present, Lineage, AcceptedEpoch, ClientKeys, Trajectory,
    Ed25519PrivateKey, Path,
)  # fmt: skip


T = TypeVar("T")


class Tried(NamedTuple):
    """One message: where it went, what became of it (ACCEPTED, REFUSED or words that begin with VIOLATION), and its
    bytes."""

    where: str
    outcome: str
    data: bytes


class TooSlowError(BaseException):
    """A message took too long. Not an Exception, so that nothing takes it for a fault of the message."""


def violation(where: str, what: str) -> str:
    return f"{VIOLATION} {where}: {what}"


def fault_at(where: str, fault: BaseException) -> str:
    """The violation that an unexpected error is."""
    at = traceback.extract_tb(fault.__traceback__)[-1]
    return violation(where, f"{type(fault).__name__} at {Path(at.filename).name}:{at.lineno}: {first_line(fault)}")


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise a TooSlowError if the main thread is inside for longer."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise TooSlowError(f"longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def tried(
    where: str, data: bytes, act: Callable[[], bool], seconds: float, clock: Callable[[], float] = time.process_time
) -> Tried:
    """Do something with a message. `act` returns whether it was refused; a BaffleError is a refusal, too. Anything else
    that is raised, or more CPU time than this for a refusal, is a violation."""
    began = clock()
    try:
        with within(60 * seconds):
            refused = act()
    except BaffleError:
        refused = True
    except (Exception, TooSlowError) as fault:
        return Tried(where, fault_at(where, fault), data)
    if refused and clock() - began > seconds:
        return Tried(where, violation(where, f"a refusal took more than {seconds:g} s"), data)
    return Tried(where, REFUSED if refused else ACCEPTED, data)


_SHAPES: dict[type, str] = {}


def shape(thing: object) -> str:
    """How to take an object apart: a container, the attributes of our own classes ("parts"), or a "piece" that never
    changes."""
    kind = type(thing)
    if kind not in _SHAPES:
        ours = kind.__module__.startswith(("baffle.", "fuzzing.")) and not issubclass(kind, (*NEVER_CHANGE, tuple))
        known = (dict, list, set, np.ndarray)
        container = next((known.__name__ for known in known if issubclass(kind, known)), "piece")
        _SHAPES[kind] = "parts" if ours else container
    return _SHAPES[kind]


def clone(thing: T) -> T:
    """A copy that shares nothing that can change. (Private keys cannot be copied, and need not be.) What is one object
    in the original is one in the copy."""
    return cast(T, _clone(thing, {}))


def _clone(original: Any, known: dict[int, Any]) -> Any:
    if id(original) in known:
        return known[id(original)]
    match shape(original):
        case "dict":
            copied: Any = {key: _clone(value, known) for key, value in original.items()}
        case "list":
            copied = [_clone(item, known) for item in original]
        case "set":
            copied = set(original)
        case "parts":
            copied = known[id(original)] = object.__new__(type(original))
            for name, value in vars(original).items():
                object.__setattr__(copied, name, value if name in CACHES else _clone(value, known))
        case _:
            return original
    known[id(original)] = copied
    return copied


def state(thing: Any) -> object:
    """Everything that an object consists of, for comparison."""
    match shape(thing):
        case "piece":
            return thing
        case "dict":
            return [(key, state(value)) for key, value in thing.items()]
        case "list":
            return [state(item) for item in thing]
        case "set":
            return set(thing)
        case "ndarray":
            return thing.tobytes()
        case _:
            return [(name, state(value)) for name, value in vars(thing).items() if name not in CACHES]


def differing(changed: Any, original: Any, path: str = "") -> list[str]:
    """The names of attributes that are not the same."""
    names: list[str] = []
    for name, value in vars(changed).items():
        before = vars(original)[name]
        if name not in CACHES and state(value) != state(before):
            both = {shape(value), shape(before)} == {"parts"}
            names += differing(value, before, f"{path}{name}.") if both else [path + name]
    return names


@dataclass
class Target:
    """One receiver in one phase. `feed` gives it a message and returns whether it refused the message. What an accepted
    message changed is restored; a refused one must have changed nothing but attributes that `may_change` allows."""

    name: str
    subject: Any
    fitting: list[bytes]
    feed: Callable[[Any, bytes], bool]
    seconds: float = 1.0
    may_change: Callable[[bytes, str], bool] = lambda _data, _name: False

    def __post_init__(self) -> None:
        self._fresh, self._subject, self._state = self.subject, clone(self.subject), state(self.subject)

    def take(self, data: bytes) -> Tried:
        """Give it a message."""
        result = tried(self.name, data, lambda: self.feed(self._subject, data), self.seconds)
        if result.outcome == REFUSED:
            if state(self._subject) == self._state:
                return result
            changed = [name for name in differing(self._subject, self._fresh) if not self.may_change(data, name)]
            if changed:
                what = f"a message that was refused changed {', '.join(changed)}"
                result = Tried(self.name, violation(self.name, what), data)
        self._subject = clone(self._fresh)
        return result


def resident_bytes() -> int:
    """The memory that this process takes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
