"""Secure sums on a bad network: many random schedules of faults, with the same few checks after every round.

    python benchmarks/schedules.py                         # 10,000 cases
    python benchmarks/schedules.py --cases 100 --seed 7    # fewer, and others
    python benchmarks/schedules.py --first 4711 --cases 1  # one case again

Control-C or a SIGTERM ends a run early and prints the results so far.

A case is a federation of real client sessions and a real server: 2 to 12 clients, one to three groups, with thresholds,
floors and tiers, with or without agreement. It plays a few rounds on a network with faults of one flavour, and then
rounds without faults. Each flavour includes the one before:

    drops    requests and replies are lost
    disorder they are also late, doubled, replayed and out of order
    damage   they are also corrupted

The checks: Each sum is the plain sum over exactly the clients that it names. Without a sum there is a reason for every
client. There is a sum exactly when enough clients sent a vector and enough of these released shares (not checked if
messages are damaged). A client that gets a request twice answers in the same way, or not at all. When the faults are
over, all sums work again. If a check fails, that is a violation, and the exit status is 1.
"""

import argparse
import json
import re
import secrets
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from hashlib import sha256
from typing import Literal
from unittest.mock import patch

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from faults import KINDS, Faults, Kind, seeded

from baffle.aggregation.client.marks import Memory
from baffle.aggregation.client.session import ClientSession
from baffle.aggregation.client.slot import MOST_QUERIES
from baffle.aggregation.client_policy import ClientPolicy
from baffle.aggregation.messages import PHASES, Agree, Hello, MaskedRequest, Turn, Turned, decode_request
from baffle.aggregation.server.secure_sum import SecureSum
from baffle.client.abstaining import abstention
from baffle.core.messages import CatchUp, Contribution, Message, RoundRequest, decode, decode_reply, encode
from baffle.core.ports import CONTRIBUTED, Collected, Transport
from baffle.core.ring import EXTRAS, Ring, RingVector, Sum, add
from baffle.errors import BaffleError, MessageError, RefusalError

LENGTH = 4
KEYS_AT_ONCE = 5
"""Keys in one list. Short lists cost less, and are renewed within a case."""

Flavour = Literal["drops", "disorder", "damage"]
KINDS_OF: dict[Flavour, tuple[Kind, ...]] = {
    "drops": ("drop request", "drop reply"),
    "disorder": tuple(kind for kind in KINDS if not kind.startswith("corrupt")),
    "damage": KINDS,
}


@dataclass(frozen=True)
class Case:
    """The settings of one schedule. They all follow from the seed and the case's number."""

    number: int
    flavour: Flavour
    n: int
    groups: int
    policy: ClientPolicy
    seed: bytes
    rates: Mapping[str, Mapping[Kind, float]]
    rounds: int


def draw_case(seed: int, number: int) -> Case:
    draw = np.random.default_rng([seed, number])
    flavour: Flavour = (("drops",) * 3 + ("disorder",) * 4 + ("damage",) * 3)[draw.integers(10)]
    n = int(draw.choice(np.arange(2, 13), p=np.arange(13, 2, -1) / np.arange(13, 2, -1).sum()))
    groups = int(draw.integers(1, 1 + min(3, n // 3))) if n >= 6 and draw.random() < 0.5 else 1
    smallest = n // groups
    agreement = bool(draw.random() < 0.25)
    least = 2 * smallest // 3 + 1 if agreement else smallest // 2 + 1
    threshold = int(draw.integers(least, smallest + 1)) if groups == 1 and draw.random() < 0.3 else 0
    tiers = {c: int(draw.choice([LENGTH, LENGTH // 2])) for c in range(n)} if draw.random() < 0.25 else {}

    @lru_cache(maxsize=8)
    def groups_of(slot: int) -> list[list[int]]:
        order = np.random.default_rng([seed, number, slot]).permutation(n).tolist()
        return [sorted(order[group::groups]) for group in range(groups)]

    floor = int(draw.integers(2, min(4, smallest) + 1))
    policy = ClientPolicy(floor, threshold, agreement, groups_of, tiers)
    phases = PHASES if draw.random() < 0.5 else [phase for phase in PHASES if draw.random() < 0.5]
    worst = float(draw.choice([0.03, 0.1, 0.3]))
    rates = {phase: {kind: float(draw.uniform(0, worst)) for kind in KINDS_OF[flavour]} for phase in phases}
    return Case(number, flavour, n, groups, policy, draw.bytes(16), rates, int(draw.integers(1, 5)))


class Clients:
    """Real sessions behind a network without faults. It remembers what each of them really sent."""

    def __init__(self, case: Case, run: bytes, ring: Ring) -> None:
        self._case, self._ring = case, ring
        identities = {client: Ed25519PrivateKey.generate() for client in range(case.n)}
        self.directory = {c: identity.public_key().public_bytes_raw() for c, identity in identities.items()}
        self.memories = {client: Memory() for client in identities}
        self.sessions = {
            c: ClientSession(c, identity, self.directory, run, case.policy, memory=self.memories[c])
            for c, identity in identities.items()
        }
        self.sent: dict[tuple[int, int], bytes] = {}  # client and round → the masked vector
        self.refusals: Counter[str] = Counter()
        self.contradictions: list[str] = []
        self._first_replies: dict[tuple[int, bytes], Message] = {}

    def exchange(self, requests: Mapping[int, bytes]) -> Mapping[int, bytes]:
        return {client: self._answer(client, data) for client, data in requests.items()}

    def _answer(self, client: int, data: bytes) -> bytes:
        try:
            reply = self._reply(client, decode_request(data))
        except BaffleError as fault:
            self._note(str(fault))
            return abstention(data)
        self._compare(client, data, reply)
        return encode(reply)

    def _reply(self, client: int, asked: Message) -> Message:
        session = self.sessions[client]
        match asked:
            case Hello():
                return session.advertise(asked.slot)
            case Turn():
                return session.turn(asked, self._note)
            case Agree():
                return session.agree(asked)
            case MaskedRequest():
                vector = session.mask(asked, lambda: self.vector(client, asked.request.round)).tobytes()
                self.sent[client, asked.request.round] = vector
                return Contribution(asked.request.round, vector)
            case _:
                raise RefusalError("a request without masks")

    def _note(self, reason: str) -> None:
        self.refusals[_words(reason)] += 1

    def _compare(self, client: int, data: bytes, reply: Message) -> None:
        """Two answers to the same bytes must agree in every part that both contain."""
        first = self._first_replies.setdefault((client, data), reply)
        pairs: list[tuple[object, object]] = [(first, reply)]
        if isinstance(first, Turned) and isinstance(reply, Turned):
            pairs = [(first.unmasked, reply.unmasked), (first.sealed, reply.sealed)]
        if any(a != b and a is not None and b is not None for a, b in pairs):
            self.contradictions.append(
                f"client gave two different answers to one {type(decode_request(data)).__name__}"
            )

    def vector(self, client: int, round_number: int) -> RingVector:
        """A client's contribution to a round, before masks."""
        k = self._case.policy.tiers.get(client, LENGTH)
        values = np.random.default_rng([self._case.number, client, round_number]).normal(size=k)
        return self._ring.encode(values, LENGTH, 1 + client, 0.5)


@dataclass
class Seen:
    """What the server received from one group in one round."""

    threshold: int = 0
    participants: tuple[int, ...] = ()
    vectors: dict[int, bytes] = field(default_factory=dict)
    answered: set[int] = field(default_factory=set)


class Watched:
    """A transport that notes what came over it."""

    def __init__(self, transport: Transport, seen: dict[tuple[int, int], Seen]) -> None:
        self.transport = transport
        self.seen = seen  # by slot and client; all clients of a group share one

    def exchange(self, requests: Mapping[int, bytes]) -> Mapping[int, bytes]:
        replies = self.transport.exchange(requests)
        for client, data in requests.items():
            asked = decode_request(data)
            if isinstance(asked, Turn) and asked.opening:
                opened = Seen(asked.opening.threshold)
                for member in asked.opening.members:
                    opened = self.seen.setdefault((asked.opening.slot, member), opened)
            if client in replies:
                self._note(client, asked, replies[client])
            if isinstance(asked, MaskedRequest):
                self.seen[asked.request.round, client].participants = asked.participants
        return replies

    def _note(self, client: int, asked: Message, data: bytes) -> None:
        try:
            if isinstance(asked, MaskedRequest):
                reply, number = decode_reply(data), asked.request.round
                if isinstance(reply, Contribution) and (reply.round, len(reply.vector)) == (
                    number,
                    4 * (LENGTH + EXTRAS),
                ):
                    self.seen[number, client].vectors[client] = reply.vector
            elif isinstance(asked, Turn) and asked.unmask:
                turned = decode(data, Turned)
                if turned.unmasked and turned.unmasked.slot == asked.unmask.slot:
                    self.seen[asked.unmask.slot, client].answered.add(client)
        except MessageError:
            pass


class ViolationError(Exception):
    """A check failed: something happened that never must."""


class Federation:
    """One case while it is played."""

    def __init__(self, case: Case) -> None:
        self.case, run = case, secrets.token_bytes(32)
        tier_factor = Fraction(LENGTH, min(case.policy.tiers.values(), default=LENGTH))
        self.ring = Ring(clients=case.n, n_max=2 * case.n, clip=4.0, tier_factor=tier_factor)
        self.clients = Clients(case, run, self.ring)
        self.server = SecureSum(self.ring, LENGTH, run, self.clients.directory, case.policy)
        self.weights = self.chain = bytes(32)
        self.seen: dict[tuple[int, int], Seen] = {}
        self.counts: Counter[str] = Counter()

    def play(self, number: int, transport: Transport) -> bool:
        """Play one round and check it. Returns whether every group has a sum over all of its clients, or all but those
        whose damaged messages were taken for lies."""
        groups = self.case.policy.groups_of(number) if self.case.policy.groups_of else []
        request = RoundRequest(number, bytes(32), self.chain, self.weights, CatchUp("weights", 0, ()))
        requests = [dict.fromkeys(group, request) for group in groups]
        collected = self.server.collect(requests, Watched(transport, self.seen))
        self.chain = sha256(self.chain + number.to_bytes(8, "big")).digest()
        if any(collected.sums):
            self.weights = sha256(self.weights + number.to_bytes(8, "big")).digest()
        for group, total in zip(groups, collected.sums, strict=True):
            self._check(number, group, total, collected)
        asked = [[c for c in group if not collected.events[c].startswith("left out")] for group in groups]
        return all(
            total and total.contributors == len(group) for group, total in zip(asked, collected.sums, strict=True)
        )

    def _check(self, number: int, group: Sequence[int], total: Sum | None, collected: Collected) -> None:
        events = {client: collected.events[client] for client in group}
        if not all(events.values()):
            raise ViolationError("a client without a reason")
        contributors = [client for client, event in events.items() if event == CONTRIBUTED]
        seen = next((self.seen[number, c] for c in group if (number, c) in self.seen), Seen())
        if self.case.flavour != "damage":
            enough = len(seen.vectors) >= max(seen.threshold, self.case.policy.floor, 1)
            expected = enough and len(seen.answered & seen.vectors.keys()) >= seen.threshold
            if bool(total) != expected:
                why = next((_words(event) for event in events.values() if "abandoned" in event), "no reason")
                raise ViolationError(f"{'enough' if expected else 'too few'} answered, sum: {bool(total)}; {why}")
        if total is None:
            self.counts["no sum"] += 1
            if contributors:
                raise ViolationError("contributors without a sum")
            return
        plain = add([self.clients.vector(client, number) for client in contributors])
        damage = [self._damage(number, client, seen) for client in contributors]
        self._require_same(total, self.ring.decode(add([plain, *damage]), len(contributors)))
        damaged = any(difference.any() for difference in damage)
        self.counts["sum with a damaged vector" if damaged else "sum"] += 1

    def _damage(self, number: int, client: int, seen: Seen) -> RingVector:
        """What the network has added to a client's vector on its way."""
        received, sent = seen.vectors[client], self.clients.sent[client, number]
        difference: RingVector = np.frombuffer(received, "<u4") - np.frombuffer(sent, "<u4")
        return difference

    @staticmethod
    def _require_same(total: Sum, expected: Sum) -> None:
        if not np.array_equal(total.totals, expected.totals) or total[1:] != expected[1:]:
            raise ViolationError("A WRONG SUM")

    @property
    def barred(self) -> Mapping[int, str]:
        """The clients that the server leaves out, and why."""
        return self.server.faults.barred

    def exhausted(self) -> bool:
        """Whether any client has answered about these weights as often as it ever will."""
        return any(memory.released(self.weights) >= MOST_QUERIES for memory in self.clients.memories.values())


def play_case(case: Case) -> tuple[Counter[str], list[str]]:
    """Play one case. Returns how often each outcome occurred, and the violations."""
    violations: list[str] = []
    federation = Federation(case)

    def play(number: int, transport: Transport) -> bool:
        try:
            return federation.play(number, transport)
        except ViolationError as fault:
            violations.append(str(fault))
        except Exception as fault:  # collect should have skipped the group instead
            violations.append(f"{type(fault).__name__} out of collect: {fault}")
        return False

    bad = Faults(federation.clients, seeded(case.seed, case.rates))
    for number in range(case.rounds):
        play(number, bad)
    if case.flavour != "damage":
        violations += [f"left out though no message was damaged: {_words(why)}" for why in federation.barred.values()]
    if case.flavour == "drops":
        violations += [f"refused though nothing but messages was lost: {w}" for w in _unexpected(federation)]
    federation.counts["case"] += 1
    federation.counts[_recovery(case, federation, play, violations)] += 1
    return federation.counts, violations + sorted(set(federation.clients.contradictions))


def _recovery(case: Case, federation: Federation, play: Callable[[int, Transport], bool], violations: list[str]) -> str:
    """After how many rounds without faults all sums are whole again, in words."""
    if _never_whole(case, {}):
        return "recovery not asked: the threshold or floor is beyond a tier or group"
    for rounds in (1, 2, 3):
        if play(case.rounds + rounds - 1, federation.clients):
            return f"whole again after {rounds} rounds"
    if federation.exhausted():
        return "never whole again: these weights have been asked about too often"
    if _never_whole(case, federation.barred):
        return "never whole again: too few clients are left besides those whose damaged messages were taken for lies"
    for rounds in (4, 5):
        if play(case.rounds + KEYS_AT_ONCE + rounds, federation.clients):
            if case.flavour != "damage":
                violations.append("whole again only with new lists of keys")
            return "whole again with new lists of keys"
    violations.append("never whole again")
    return "never whole again"


def _never_whole(case: Case, barred: Mapping[int, str]) -> bool:
    """Whether the case cannot work even without faults: without the barred clients, a group has fewer clients than the
    floor or the threshold, or some tier of it fewer than the floor."""
    policy, tiers = case.policy, case.policy.tiers
    planned = [g for s in range(case.rounds, case.rounds + KEYS_AT_ONCE + 6) for g in policy.groups_of(s)]  # type: ignore[misc]
    for whole in planned:
        group = [client for client in whole if client not in barred]
        threshold = policy.threshold or policy.least_threshold(policy.graph(tuple(group), 0), len(whole))
        prefixes = [sum(tiers[c] >= k for c in group) for k in {tiers[c] for c in group if tiers}]
        if len(group) < max(threshold, policy.floor) or any(prefix < policy.floor for prefix in prefixes):
            return True
    return False


EXPECTED = ("survivors evaluate", "agreed on the survivors", "have been asked about")
"""Why a client may refuse if messages were lost and nothing else happened: a tier with few survivors, too few
signatures, or too many requests about the same weights."""


def _unexpected(federation: Federation) -> list[str]:
    return [why for why in federation.clients.refusals if not any(words in why for words in EXPECTED)]


def _words(text: str) -> str:
    """A message without its numbers, so that equal ones can be counted."""
    return re.sub(r"-?\d+", "#", text)


def _few(cases: list[int]) -> list[int]:
    return sorted(set(cases))[:5]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    counts: dict[str, Counter[str]] = {flavour: Counter() for flavour in KINDS_OF}
    violation_counts: Counter[str] = Counter()
    examples: dict[str, list[int]] = {}
    began = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    done = 0
    with patch("baffle.aggregation.client.session.KEYS_AT_ONCE", KEYS_AT_ONCE), suppress(KeyboardInterrupt):
        for number in range(args.first, args.first + args.cases):
            case = draw_case(args.seed, number)
            outcomes, violations = play_case(case)
            done += 1
            counts[case.flavour].update(outcomes)
            for violation in violations:
                key = f"{case.flavour}: {violation}"
                violation_counts[key] += 1
                examples.setdefault(key, []).append(number)
            if done % 100 == 0:
                seconds = time.monotonic() - began
                total = violation_counts.total()
                print(f"{done} cases, {seconds:.0f} s, {total} violations", file=sys.stderr, flush=True)
    result = {
        "cases": done,
        "seed": args.seed,
        "seconds": round(time.monotonic() - began, 1),
        "cpu_seconds": round(time.process_time(), 1),
        "outcomes": {flavour: dict(sorted(counts[flavour].items())) for flavour in counts},
        "violations": {
            key: {"times": times, "cases": _few(examples[key])} for key, times in violation_counts.most_common()
        },
    }
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        print(f"{done} cases in {result['seconds']} s")
        for flavour, outcomes in counts.items():
            print(flavour)
            for what, times in sorted(outcomes.items()):
                print(f"  {times:7} {what}")
        for what, times in violation_counts.most_common():
            print(f"VIOLATION {times} × {what}, cases {_few(examples[what])}")
    sys.exit(bool(violation_counts))


if __name__ == "__main__":
    main()
