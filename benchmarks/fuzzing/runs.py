"""Whole runs of `serve` in memory, with real clients of which two lie now and then, in every phase from joining to the
end. Each run must come to its end, and its journal must verify."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

from baffle.core.messages import tag_of
from baffle.errors import BaffleError
from baffle.journal.audit import verify
from baffle.network.member.policy import Policy
from baffle.plan import parse
from fuzzing.checks import ACCEPTED, TooSlowError, Tried, fault_at, violation, within
from fuzzing.damage import Mutations, is_list
from fuzzing.members import MODES, PLAN, impatient
from tests.support.lines_in_memory import Answer, Federation, new_keys

CLIENTS, HONEST = 7, 5
"""More than two thirds are honest: with fewer no run could go on in which the server may lie."""

SECONDS = 120.0
"""No run takes longer. One without lies takes about a second."""

OFTEN = 0.3
"""The share of its answers that a liar damages."""


def runs(count: int, seed: int) -> Iterator[Tried]:
    """Malformed answers in whole runs."""
    draw, done = Random(seed), 0
    with tempfile.TemporaryDirectory() as name, impatient():
        while done < count:
            folder = Path(name) / f"run-{done}"
            folder.mkdir()
            mode = draw.choice(list(MODES))
            settings = [f"federation.clients={CLIENTS}", "run.deadline_seconds=0.2", *MODES[mode]]
            policy = Policy(mode="off" if mode == "off" else "on", floor=2, least_liars=1, without_privacy=True)
            keys = new_keys(folder, CLIENTS)  # clients remember how many statements led to nothing
            federation = Federation(keys, folder, parse(PLAN, settings), policy=policy)
            lies: list[tuple[str, bytes]] = []
            fault = _played(federation, draw, lies)
            for tag, data in lies[: count - done]:
                done += 1
                where = f"run, {tag} ({mode})"
                yield Tried(where, violation("a run", fault) if fault else ACCEPTED, data)


def _played(federation: Federation, draw: Random, lies: list[tuple[str, bytes]]) -> str:
    """Play a run, and return what went wrong."""
    lines = federation.lines(CLIENTS)
    for liar in range(HONEST, CLIENTS):
        lines.clients[liar] = _lying(lines.clients[liar], Random(draw.random()), lies)
    try:
        with within(SECONDS):
            summary = federation.serve(lines, least=HONEST)
            verify(federation.run)
    except BaffleError as fault:
        return f"it ended with {type(fault).__name__}: {fault}"
    except (Exception, TooSlowError) as fault:
        return fault_at("serve", fault)
    return "" if summary["rounds"] == federation.plan.rounds else f"it ended after {summary['rounds']} rounds"


def _lying(honest: Answer, draw: Random, lies: list[tuple[str, bytes]]) -> Callable[[bytes], bytes | None]:
    mutations = Mutations(draw, [b"\x91\xa7unready"])

    def answer(data: bytes) -> bytes | None:
        reply = honest(data)
        if reply is None or draw.random() > OFTEN:
            return reply
        lie = mutations.of(reply) if is_list(reply) else mutations.bytes_of(reply)
        lies.append((tag_of(data), lie))
        return lie

    return answer
