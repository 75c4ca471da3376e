"""A networked client before every message of a run, and a server that signs its messages and lies.

A real federation plays a run in memory, with clients that come late, so that there are two epochs. A client answers
every message. When it abstains it has changed nothing, but for the slot that a request to compute uses up. A client may
also give up the run, because the server's history does not match its own replay; this does not count as a change.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from pathlib import Path
from random import Random
from unittest.mock import patch

import msgspec
import torch

from baffle.client.abstaining import abstention
from baffle.core.messages import tag_of
from baffle.data import handwriting
from baffle.network.joining import UNREADY
from baffle.network.member.member import Member
from baffle.network.member.policy import Policy
from baffle.plan import Plan, parse
from fuzzing.checks import Target, Tried, clone
from fuzzing.damage import Mutations
from tests.support.lines_in_memory import Federation, LinesInMemory, new_keys

CLIENTS, VICTIM, LATE = 4, 0, 12
UNIFORM = 'federation.weighting="uniform"'
LYING = ('secure.mode="malicious-server"', UNIFORM)
PRIVATE = (UNIFORM, "privacy.noise=1.0", "privacy.clip=2.0")
HEAD = 'probe.head="exact"'
STEPS = ("federation.local_steps=2", "federation.warm_up=1")
MODES = {
    "off": ('secure.mode="off"',),
    "on": ('secure.mode="on"',),
    "exact head": ('secure.mode="on"', HEAD),
    "several steps": ('secure.mode="on"', *STEPS),
    "malicious-server": (*LYING, *STEPS),
    "private": ('secure.mode="on"', *PRIVATE),
    "private, malicious-server": (*LYING, *PRIVATE, HEAD, "privacy.noise=30.0", "secure.liars=1"),
}
MISTAKE = "a mistake in BAFFLE"

PLAN = """
name = "fuzzed"
rounds = 6
task.model = {name = "softmax"}
federation.clients = 4
probe = {k = 4, distribution = "rademacher"}
secure.floor = 2
run = {deadline_seconds = 5.0, evaluate_every = 100, snapshot_every = 2}
"""


class Always:
    """Logs everything, however often."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell

    def __call__(self, words: str) -> None:
        self._tell(words)


@contextmanager
def impatient() -> Iterator[None]:
    """Nobody waits, nothing is made durable, samples are read once, and every reason is told."""
    torch.set_num_threads(1)
    with ExitStack() as patches:
        for name, value in {
            "baffle.network.member.member.RateLimitedLog": Always,
            "baffle.aggregation.client.session.KEYS_AT_ONCE": 4,
            "baffle.data.handwriting._all_digits": lru_cache(handwriting._all_digits),
            "baffle.aggregation.client.marks.MarksFile._require_ours": lambda _marks, _file: (
                None
            ),  # clones share a file
            "os.fsync": lambda _file: None,
        }.items():
            patches.enter_context(patch(name, value))
        yield


class Recorded:
    """A run of a mode, with the victim as it was before each kind of message, and what it was sent then."""

    def __init__(self, mode: str, folder: Path) -> None:
        self.log: list[str] = []
        self.before: dict[str, tuple[Member, bytes]] = {}
        self.requests: list[bytes] = []
        self._seen: dict[str, int] = {}
        plan: Plan = parse(PLAN, MODES[mode])
        policy = Policy(mode="off" if mode == "off" else "on", floor=2, least_liars=1, without_privacy=True)
        federation = Federation(new_keys(folder, CLIENTS), folder, plan, policy=policy)
        lines = federation.lines(CLIENTS - 1)
        member = federation.member(VICTIM, tell=self.log.append)
        lines.clients[VICTIM] = lambda data: self._answer(member, data)
        lines.before = lambda exchange: self._come(federation, lines, exchange)
        federation.serve(lines, least=CLIENTS - 1)
        self.before["nothing more"] = clone(member), self.requests[-1]
        if self.log and any(MISTAKE in words for words in self.log):
            raise AssertionError(f"the run itself goes wrong: {self.log}")

    @staticmethod
    def _come(federation: Federation, lines: LinesInMemory, exchange: int) -> None:
        """The last client comes late, and does not open its first nonce: the next statement holds evidence of that."""
        if exchange != LATE:
            return
        member, lies = federation.member(CLIENTS - 1), list[bytes]()

        def answer(data: bytes) -> bytes | None:
            if tag_of(data) == "begin" and not lies:
                lies.append(data)
                return None
            return member.answer(data)

        lines.clients[CLIENTS - 1] = answer

    def _answer(self, member: Member, data: bytes) -> bytes:
        """Remember the victim before the first message of a kind, and before one that comes late in the run."""
        kind = tag_of(data)
        self._seen[kind] = self._seen.get(kind, 0) + 1
        if self._seen[kind] in (1, 3):  # the third statement holds evidence
            name = kind if self._seen[kind] == 1 else f"a later {kind}"
            self.before[name] = clone(member), data
        self.requests.append(data)
        return member.answer(data)


def to_member(log: list[str]) -> Callable[[Member, bytes], bool]:
    """Gives a message to a client, and returns whether it was refused."""

    def feed(member: Member, data: bytes) -> bool:
        del log[:]
        reply = member.answer(data)
        if mistakes := [words for words in log if MISTAKE in words]:
            raise AssertionError(mistakes[0])
        if reply == UNREADY:
            return member._client is not None
        return reply == abstention(data) or _is_nothing_turned(reply)

    return feed


def _is_nothing_turned(reply: bytes) -> bool:
    tag, *parts = msgspec.msgpack.decode(reply)
    return bool(tag == "turned" and parts[:2] == [None, None])


def may_change(data: bytes, name: str) -> bool:
    """What a client that abstains may have changed: a request to compute uses up a slot."""
    return tag_of(data) == "masked-request" and name.endswith(("memory._marks", "memory._size", "ledger._counts"))


def targets_of(run: Recorded, mode: str) -> list[Target]:
    return [
        Target(f"member before {name} ({mode})", member, [fitting], to_member(run.log), may_change=may_change)
        for name, (member, fitting) in run.before.items()
    ]


def members(count: int, seed: int) -> Iterator[Tried]:
    """Malformed messages of a server, signed, to a client."""
    draw = Random(seed)
    with tempfile.TemporaryDirectory() as folder, impatient():
        runs: Mapping[str, Recorded] = {mode: Recorded(mode, Path(folder) / mode) for mode in MODES}
        targets = [target for mode, run in runs.items() for target in targets_of(run, mode)]
        corpus = sorted({request for run in runs.values() for request in run.requests}, key=len)
        mutations = Mutations(draw, corpus)
        for _ in range(count):
            target = draw.choice(targets)
            yield target.take(mutations.of(draw.choice(target.fitting if draw.random() < 0.7 else corpus)))
