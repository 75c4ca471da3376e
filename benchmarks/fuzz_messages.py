"""Nonsense for both ends of a secure sum: a million malformed messages, to clients and to the server, in every phase.

    python benchmarks/fuzz_messages.py                      # 1,000,000 messages
    python benchmarks/fuzz_messages.py --count 20000 --seed 7 --json

Control-C or a SIGTERM ends a run early and prints the results so far.

Messages of a real round are damaged: bits are flipped, bytes cut off, added, spliced and nested, and fields get other
types, other tags, extreme numbers and false lengths. Each message goes to one of these:

    client   a real client before each phase, and after the last one
    server   the server's half of a slot in each phase
    decode   the reader of one type of message; what it accepts must read the same when written again
    collect  a whole round in which one client sends it in one phase (one message in 500: it costs as much as a round)

The checks: Nothing but a BaffleError is raised. A message that was refused has changed nothing. After a share that was
accepted, the sum is the plain one, or there is none. At the end, the process has grown by at most 10 MB. If a check
fails, that is a violation, and the exit status is 1. What an accepted message changed is restored each time.
"""

import argparse
import json
import os
import secrets
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, TypeVar, cast
from unittest.mock import patch

import msgspec
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from baffle.aggregation.client.mark_lines import Marks
from baffle.aggregation.client.session import ClientSession
from baffle.aggregation.client_policy import ClientPolicy, Slot, checked_slot
from baffle.aggregation.messages import Advertisement, Agreed, Turn, Turned, decode_request, phase_of
from baffle.aggregation.server.secure_sum import SecureSum
from baffle.aggregation.server.slot import ServerSlot
from baffle.client.client import Client
from baffle.client.replica import Replica
from baffle.client.worker import Worker
from baffle.core.messages import CatchUp, Message, RoundRequest, contribution_to, decode, encode
from baffle.core.ports import CONTRIBUTED
from baffle.core.ring import EXTRAS, Ring, RingVector, Sum, add
from baffle.errors import BaffleError, MessageError

N, LENGTH, VICTIM, ROUND = 4, 3, 0, 1
KEYS_AT_ONCE = 4
MOST_GROWTH = 10 * 2**20
CACHES = {"_channels", "_near", "_private_keys", "_weights", "_ranks"}
"""Attributes that only save work, and may change at any time."""

T = TypeVar("T")


@dataclass(frozen=True)
class Fixed:
    """Stands in for a client's worker and replica: its vector is always the same."""

    number: int

    def weights_for(self, _request: RoundRequest) -> None:
        """No weights are needed."""

    def vector(self, _round: int, _weights: None) -> RingVector:
        return vector(self.number)


def vector(client: int) -> RingVector:
    return RING.encode(np.arange(LENGTH, dtype=np.float64) - client / 2, LENGTH, 1 + client, 0.5)


RING = Ring(clients=N, n_max=2 * N, clip=4.0)


SHAPES: dict[type, str] = {}


def shape(thing: object) -> str:
    """How to take an object apart: a container, the attributes of our own classes ("parts"), or a "piece" that never
    changes."""
    kind = type(thing)
    if kind not in SHAPES:
        ours = kind.__module__.startswith(("baffle.", __name__)) and not issubclass(
            kind, Message | Marks | ClientPolicy | Slot | tuple
        )
        container = next((known.__name__ for known in (dict, list, np.ndarray) if issubclass(kind, known)), "piece")
        SHAPES[kind] = "parts" if ours else container
    return SHAPES[kind]


def clone(thing: T) -> T:
    """A copy that shares nothing that can change. (Private keys cannot be copied, and need not be.)"""
    original: Any = thing
    match shape(thing):
        case "dict":
            return cast(T, {key: clone(value) for key, value in original.items()})
        case "list":
            return cast(T, [clone(item) for item in original])
        case "parts":
            copied = object.__new__(type(original))
            for name, value in vars(original).items():
                object.__setattr__(copied, name, clone(value))
            return cast(T, copied)
        case _:
            return thing


def state(thing: Any) -> object:
    """Everything that an object consists of, for comparison."""
    match shape(thing):
        case "piece":
            return thing
        case "dict":
            return [(key, state(value)) for key, value in thing.items()]
        case "list":
            return [state(item) for item in thing]
        case "ndarray":
            return thing.tobytes()
        case _:
            return [(name, state(value)) for name, value in vars(thing).items() if name not in CACHES]


class Federation:
    """A federation that records its round: every message, and the victim's client before each phase. `replaced` holds,
    by phase, what is sent instead of the victim's reply."""

    def __init__(self, *, agreement: bool, replaced: Mapping[str, bytes] | None = None) -> None:
        self._replaced = replaced or {}
        self.run = secrets.token_bytes(32)
        identities = {client: Ed25519PrivateKey.generate() for client in range(N)}
        self.directory = {c: identity.public_key().public_bytes_raw() for c, identity in identities.items()}
        self.policy = ClientPolicy(agreement=agreement)
        sessions = {
            c: ClientSession(c, identity, self.directory, self.run, self.policy) for c, identity in identities.items()
        }
        self.clients = {
            c: Client(cast(Replica, Fixed(c)), cast(Worker, Fixed(c)), session) for c, session in sessions.items()
        }
        self.server = SecureSum(RING, LENGTH, self.run, self.directory, self.policy)
        self.requests: dict[str, dict[int, bytes]] = {}
        self.replies: dict[str, dict[int, bytes]] = {}
        self.before: dict[str, Client] = {}
        self.request = RoundRequest(ROUND, bytes(32), bytes(32), bytes(32), CatchUp("weights", 0, (b"",)))
        self.collected = self.server.collect([dict.fromkeys(range(N), self.request)], self)
        self.before["nothing more"] = clone(self.clients[VICTIM])

    def exchange(self, requests: Mapping[int, bytes]) -> Mapping[int, bytes]:
        phase = phase_of(decode_request(next(iter(requests.values()))))
        self.before[phase] = clone(self.clients[VICTIM])
        self.requests[phase] = dict(requests)
        self.replies[phase] = {client: self.clients[client].answer(data) for client, data in requests.items()}
        if phase in self._replaced and VICTIM in requests:
            self.replies[phase][VICTIM] = self._replaced[phase]
        return self.replies[phase]

    def slots(self) -> dict[str, ServerSlot]:
        """For each phase, the server's half when all but the victim have answered."""
        asked = cast(Turn, decode_request(self.requests["share"][VICTIM]))
        lists = {client: decode(data, Advertisement) for client, data in self.replies["keys"].items()}
        slot = ServerSlot(self.run, checked_slot(cast(Any, asked.opening), self.policy), lists)
        by_phase: dict[str, ServerSlot] = {}

        def all_but_victim_then_victim(phase: str) -> None:
            for client in reversed(range(N)):
                if client == VICTIM:
                    by_phase[phase] = clone(slot)
                TAKE[phase](self, slot, client, self.replies[phase][client])

        all_but_victim_then_victim("share")
        slot.requests(dict.fromkeys(range(N), self.request))
        all_but_victim_then_victim("vector")
        slot.survivors()
        if self.policy.agreement:
            all_but_victim_then_victim("agree")
        all_but_victim_then_victim("unmask")
        return by_phase


def take_sealed(_: Federation, slot: ServerSlot, client: int, data: bytes) -> None:
    sealed = decode(data, Turned).sealed
    if sealed is None:
        raise MessageError("nothing sealed")
    slot.take_sealed(client, sealed)


def take_vector(federation: Federation, slot: ServerSlot, client: int, data: bytes) -> None:
    slot.take_vector(client, contribution_to(federation.request, data), LENGTH + EXTRAS)


def take_agreed(federation: Federation, slot: ServerSlot, client: int, data: bytes) -> None:
    slot.take_agreed(client, decode(data, Agreed), federation.directory[client])


def take_unmasked(_: Federation, slot: ServerSlot, client: int, data: bytes) -> None:
    unmasked = decode(data, Turned).unmasked
    if unmasked is None:
        raise MessageError("nothing released")
    slot.take_unmasked(client, unmasked)


TAKE: dict[str, Callable[[Federation, ServerSlot, int, bytes], None]] = {
    "share": take_sealed,
    "vector": take_vector,
    "agree": take_agreed,
    "unmask": take_unmasked,
}

EXTREMES = (0, 1, 2, N, N - 1, 63, 64, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -1, -(2**63))
OTHERS: tuple[Any, ...] = (
    None,
    True,
    1.5,
    float("nan"),
    "",
    "text",
    b"",
    bytes(31),
    bytes(32),
    bytes(64),
    [],
    [[]],
    {1: 2},
)
HUGE = tuple(head + b"\xff\xff\xff\xff" for head in (b"\xdd", b"\xc6", b"\xdb", b"\xdf", b"\xc9"))
TAGS = tuple(cast(str, kind.__struct_config__.tag) for kind in Message.__subclasses__())
KINDS = tuple(Message.__subclasses__())


class Mutations:
    """Turns real messages into malformed ones."""

    def __init__(self, seed: int, corpus: list[bytes]) -> None:
        self.draw, self._corpus = Random(seed), corpus
        self._ways = (self._flip, self._cut, self._extend, self._splice, self._huge, self._random, self._nest)

    def of(self, data: bytes) -> bytes:
        return self._tree(data) if self.draw.random() < 0.5 else self.draw.choice(self._ways)(data)

    def _flip(self, data: bytes) -> bytes:
        damaged = bytearray(data)
        for _ in range(self.draw.randrange(1, 5) if data else 0):
            damaged[self.draw.randrange(len(data))] ^= 1 << self.draw.randrange(8)
        return bytes(damaged)

    def _cut(self, data: bytes) -> bytes:
        return data[: self.draw.randrange(len(data) or 1)]

    def _extend(self, data: bytes) -> bytes:
        return data + self.draw.randbytes(self.draw.randrange(1, 100))

    def _splice(self, data: bytes) -> bytes:
        other = self.draw.choice(self._corpus)
        return data[: self.draw.randrange(len(data))] + other[self.draw.randrange(len(other)) :]

    def _huge(self, data: bytes) -> bytes:
        place, head = self.draw.randrange(len(data)), self.draw.choice(HUGE)
        return data[:place] + head + data[place + self.draw.choice((0, 1, 5, 9)) :]

    def _random(self, _: bytes) -> bytes:
        return self.draw.randbytes(self.draw.choice((0, 1, 10, 100, 1000)))

    def _nest(self, data: bytes) -> bytes:
        head = self.draw.choice((b"\x91", b"\x92\x01", b"\x81\xa1a", bytes([0x92, 0xA5]) + b"group"))
        return head * self.draw.choice((1, 2, 100, 5000)) + data

    def _tree(self, data: bytes) -> bytes:
        """Well-formed msgpack with other content in one or two places."""
        tree: list[Any] = msgspec.msgpack.decode(data)
        change = self._vary if self.draw.random() < 0.7 else self._change
        for _ in range(self.draw.randrange(1, 3)):
            change(tree)
        return msgspec.msgpack.encode(tree)

    def _vary(self, node: list[Any]) -> None:
        """Change the content, but keep the types right."""
        if node and isinstance(node[0], str):
            place = self.draw.randrange(1, len(node))
            match node[place]:
                case list():
                    self._vary(node[place])
                case int():
                    node[place] = self.draw.choice((*EXTREMES[:9], node[place] + 1))
                case bytes() if node[place]:
                    node[place] = self._flip(node[place])
            return
        place = self.draw.randrange(len(node) + 1)
        match self.draw.choice(("less", "less", "more", "order", "content")):
            case "less":
                del node[place : place + 1]
            case "more":
                node.insert(place, self.draw.choice((*node, self.draw.randrange(N + 1))))
            case "order":
                node.reverse()
            case _ if place < len(node):
                node[place] = self._flip(node[place]) if isinstance(node[place], bytes) else self.draw.randrange(N + 1)

    def _change(self, node: list[Any]) -> None:
        place = self.draw.randrange(len(node)) if node else 0
        if not node or self.draw.random() < 0.1:
            node.insert(place, clone(self.draw.choice((*EXTREMES[:6], *OTHERS))))
        elif isinstance(node[place], list) and self.draw.random() < 0.8:
            self._change(node[place])
        elif self.draw.random() < 0.15:
            del node[place]
        else:
            node[place] = self._instead(node[place])

    def _instead(self, value: Any) -> Any:
        usual = self.draw.random() < 0.8
        match value:
            case int() if usual:
                return self.draw.choice((*EXTREMES, max(value - 1, 0), min(value + 1, 2**63)))
            case bytes() if usual and value:
                return self.draw.choice((self._flip, self._cut, self._extend))(value)
            case str() if usual:
                return self.draw.choice(TAGS)
            case list() if usual and value:
                return self.draw.choice((value[::-1], value + value, value[:1] * len(value), value[1:]))
            case _:
                return clone(self.draw.choice((*EXTREMES, *OTHERS)))


@dataclass
class Target:
    """One receiver in one phase. `feed` gives it a message and returns whether it refused the message."""

    name: str
    subject: Any
    fitting: list[bytes]
    feed: Callable[[Any, bytes], bool]

    def __post_init__(self) -> None:
        self._fresh, self._subject, self._state = self.subject, clone(self.subject), state(self.subject)

    def take(self, data: bytes) -> str:
        """Give it a message, and return "refused", "accepted" or a violation."""
        try:
            refused = self.feed(self._subject, data)
        except BaffleError:
            refused = True
        except Exception as fault:
            self._subject = clone(self._fresh)
            where = traceback.extract_tb(fault.__traceback__)[-1]
            return (
                f"VIOLATION {self.name}: {type(fault).__name__} at {Path(where.filename).name}:{where.lineno}: {fault}"
            )
        if not refused:
            self._subject = clone(self._fresh)
            return "accepted"
        if state(self._subject) == self._state:
            return "refused"
        changed = differing(self._subject, self._fresh)
        self._subject = clone(self._fresh)
        return f"VIOLATION {self.name}: a refused {kind_of(data)} changed {', '.join(changed)}"


def kind_of(data: bytes) -> str:
    try:
        return type(decode_request(data)).__name__
    except MessageError:
        return "message"


def differing(changed: Any, original: Any, path: str = "") -> list[str]:
    """The names of attributes that are not the same."""
    names: list[str] = []
    for name, value in vars(changed).items():
        before = vars(original)[name]
        if name not in CACHES and state(value) != state(before):
            names += differing(value, before, f"{path}{name}.") if shape(value) == "parts" else [path + name]
    return names


def to_client(client: Client, data: bytes) -> bool:
    tag, *parts = msgspec.msgpack.decode(client.answer(data))
    return bool(tag == "abstention" or (tag == "turned" and parts[:2] == [None, None]))


def to_server(federation: Federation, phase: str) -> Callable[[ServerSlot, bytes], bool]:
    def feed(slot: ServerSlot, data: bytes) -> bool:
        TAKE[phase](federation, slot, VICTIM, data)
        if phase == "unmask":
            require_right_or_none(slot)
        return False

    return feed


def require_right_or_none(slot: ServerSlot) -> None:
    try:
        total = RING.decode(slot.total(), len(slot.alive))
    except MessageError:
        return
    require_plain(total, slot.alive)


def require_plain(total: Sum, contributors: Iterable[int]) -> None:
    vectors = [vector(client) for client in contributors]
    expected = RING.decode(add(vectors), len(vectors))
    if not np.array_equal(total.totals, expected.totals) or total[1:] != expected[1:]:
        raise AssertionError("A WRONG SUM")


def to_reader(kind: type[Message]) -> Callable[[None, bytes], bool]:
    def feed(_: None, data: bytes) -> bool:
        message = decode(data, kind)
        if encode(decode(encode(message), kind)) != encode(message):
            raise AssertionError("a message that reads otherwise when written again")
        return False

    return feed


def targets_of(federation: Federation) -> list[Target]:
    mode = "agreement" if federation.policy.agreement else "plain"
    requests = {phase: [sent[VICTIM]] for phase, sent in federation.requests.items()}
    everything = [sent[VICTIM] for sent in federation.requests.values()]
    targets = [
        Target(f"client before {phase} ({mode})", client, requests.get(phase, everything), to_client)
        for phase, client in federation.before.items()
    ]
    for phase, slot in federation.slots().items():
        reply = federation.replies[phase][VICTIM]
        targets.append(Target(f"server in {phase} ({mode})", slot, [reply], to_server(federation, phase)))
    return targets


def to_collect(agreement: bool, phase: str) -> Callable[[None, bytes], bool]:
    """A whole round in which the victim sends the message in one phase."""

    def feed(_: None, data: bytes) -> bool:
        federation = Federation(agreement=agreement, replaced={phase: data})
        total, events = federation.collected.sums[0], federation.collected.events
        if total and phase != "vector":  # nobody can tell a damaged vector from a different one
            require_plain(total, [client for client, event in events.items() if event == CONTRIBUTED])
        return False

    return feed


def rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def fuzz(count: int, seed: int) -> dict[str, Any]:
    federations = [Federation(agreement=agreement) for agreement in (False, True)]
    exchanges = [messages for f in federations for part in (f.requests, f.replies) for messages in part.values()]
    corpus = [data for messages in exchanges for data in messages.values()]
    ends = [target for federation in federations for target in targets_of(federation)]
    readers = [Target(f"decode {kind.__name__}", None, corpus, to_reader(kind)) for kind in KINDS]
    rounds = [
        Target(f"collect, {phase}", None, [replies[VICTIM]], to_collect(f.policy.agreement, phase))
        for f in federations
        for phase, replies in f.replies.items()
    ]
    mutations, draw = Mutations(seed, corpus), Random(seed + 1)
    outcomes: dict[str, Counter[str]] = {}
    violations: Counter[str] = Counter()
    examples: dict[str, str] = {}
    began, warm, grown = time.monotonic(), count // 10, rss()
    done = 0
    with suppress(KeyboardInterrupt):
        for number in range(count):
            if number == warm:
                grown = rss()
            target = draw.choice(rounds if number % 500 == 499 else readers if number % 8 == 7 else ends)
            data = mutations.of(draw.choice(target.fitting if draw.random() < 0.8 else corpus))
            outcome = target.take(data)
            if outcome.startswith("VIOLATION"):
                violations[outcome] += 1
                examples.setdefault(outcome, data[:2000].hex())
                outcome = "violation"
            done += 1
            outcomes.setdefault(target.name.split(" (")[0], Counter())[outcome] += 1
            if number % 20_000 == 19_999:
                seconds = time.monotonic() - began
                print(
                    f"{number + 1} messages, {seconds:.0f} s, {violations.total()} violations",
                    file=sys.stderr,
                    flush=True,
                )
    grown, seconds = rss() - grown, time.monotonic() - began
    if grown > MOST_GROWTH:
        violations[f"VIOLATION: the process has grown by {grown / 2**20:.1f} MB"] += 1
    return {
        "messages": done,
        "seed": seed,
        "seconds": round(seconds, 1),
        "messages_per_second": round(done / seconds),
        "grown_bytes": grown,
        "outcomes": {name: dict(sorted(counts.items())) for name, counts in sorted(outcomes.items())},
        "violations": {what: {"times": n, "example": examples.get(what, "")} for what, n in violations.most_common()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with patch("baffle.aggregation.client.session.KEYS_AT_ONCE", KEYS_AT_ONCE):
        result = fuzz(args.count, args.seed)
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        for name, counts in result["outcomes"].items():
            print(f"{name:34} {', '.join(f'{times} {what}' for what, times in counts.items())}")
        print(
            f"{result['messages']} messages in {result['seconds']} s, {result['messages_per_second']} a second, "
            f"grown by {result['grown_bytes'] / 2**20:.1f} MB"
        )
        for what, violation in result["violations"].items():
            print(f"{violation['times']} × {what}\n    {violation['example'][:200]}")
    sys.exit(bool(result["violations"]))


if __name__ == "__main__":
    main()
