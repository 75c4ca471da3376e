"""What a server does about clients that are further than its journal, because a copy was put back, or they lie."""

import re
import shutil
from contextlib import nullcontext

import msgspec
import pytest

from baffle.core.messages import decode, encode, tag_of
from baffle.errors import JournalError
from baffle.journal.audit import verify
from baffle.network.joining import Begin, Ready, decode_asked
from baffle.plan import change
from tests.support.lines_in_memory import Answer, Federation, LinesInMemory, StoppedError

COPIED = 2
"""How many rounds a copy of the run's folder holds."""


def claiming(answer: Answer, **claims: int) -> Answer:
    """A client that lies about how far it is, and is honest in everything else."""

    def lie(data: bytes) -> bytes | None:
        reply = answer(data)
        if reply is None or not isinstance(decode_asked(data), Begin) or tag_of(reply) != "ready":
            return reply
        return encode(msgspec.structs.replace(decode(reply, Ready), **claims))

    return lie


def play_and_put_back(federation: Federation, rounds: int = 6) -> LinesInMemory:
    """Play the run to its end, or kill the server after some rounds, and put a copy back that was made after two.
    Returns the lines to its clients."""
    lines = federation.lines(4)
    copy = federation.folder / "copy"

    def make_copy(_exchange: int) -> None:
        metrics = federation.run / "metrics.jsonl"
        played = metrics.read_text().count("\n") if metrics.exists() else 0
        if not copy.exists() and played == COPIED:
            shutil.copytree(federation.run, copy)
        if played == rounds < 6:
            raise StoppedError

    lines.before = make_copy
    with nullcontext() if rounds == 6 else pytest.raises(StoppedError):
        federation.serve(lines)
    lines.before = lambda _exchange: None
    shutil.rmtree(federation.run)
    copy.rename(federation.run)
    assert verify(federation.run).rounds == COPIED
    return lines


@pytest.mark.parametrize(("restarted", "downlink"), [(False, "scalars"), (True, "weights")])
def test_a_server_refuses_to_go_on_from_an_older_copy(federation: Federation, restarted: bool, downlink: str) -> None:
    """A client that was restarted may hold no weights: it keeps them only if it replays rounds. Its marks tell."""
    federation.plan = change(federation.plan, [f'run.downlink="{downlink}"', "update.ema=0"])
    lines = play_and_put_back(federation, rounds=5 if restarted else 6)
    with pytest.raises(JournalError) as refused:
        federation.serve(federation.lines(4) if restarted else lines)
    reached = r"[45]" if restarted else "6"
    assert re.fullmatch(
        rf"4 of 4 clients have reached round {reached} of this run, but the journal in {federation.run} ends at round "
        "2, so it is an older copy; clients answer no round twice, so put a newer copy of the folder back, or begin "
        "a new run with another --out",
        str(refused.value),
    )
    assert verify(federation.run).rounds == COPIED


def test_an_older_copy_of_a_run_that_was_extended_is_not_handed_out_as_its_end(federation: Federation) -> None:
    lines = play_and_put_back(federation)
    federation.plan = change(federation.plan, [f"rounds={COPIED}"])
    with pytest.raises(JournalError, match="so it is an older copy"):
        federation.serve(lines)
    shutil.rmtree(federation.run)  # a new run begins in its place
    assert federation.serve(lines)["skipped_rounds"] == 0


def test_half_of_the_clients_are_not_enough_to_stop_a_server(federation: Federation) -> None:
    lines = federation.lines(4)
    for client, claims in ((0, {"held": 999}), (1, {"answered": 1000})):
        lines.clients[client] = claiming(lines.clients[client], **claims)
    assert federation.serve(lines)["skipped_rounds"] == 0
    for client in (0, 1):
        assert federation.said(f"client {client} says that it has reached round 999, but the journal ends at round 0")
    federation.require_agreement(range(4))


def test_a_liar_that_comes_first_cannot_stop_a_server_either(federation: Federation) -> None:
    """The server waits until enough clients for a round are here before it judges."""
    federation.serve(federation.lines(4))
    federation.plan = change(federation.plan, ["rounds=8"])
    honest = federation.lines(4).clients
    lines = LinesInMemory({1: claiming(honest.pop(1), held=999)})

    def tell(line: str) -> None:
        federation.told.append(line)
        if "1 clients are here, 3 are needed to begin: waiting" in line:
            lines.clients.update(honest)

    summary = federation.serve(lines, tell=tell)
    assert (summary["rounds"], summary["skipped_rounds"]) == (8, 0)
    assert federation.said("client 1 says that it has reached round 999, but the journal ends at round 6")


def test_a_liar_among_two_cannot_stop_a_server(federation: Federation) -> None:
    """Without secure sums one client is enough for a round; the salt needs more than a third of the roster."""
    federation.plan = change(federation.plan, ['secure.mode="off"'])
    honest = {number: federation.member(number, pinned=federation.plan).answer for number in (2, 3)}
    lines = LinesInMemory({**honest, 2: claiming(honest[2], held=999)})
    assert federation.serve(lines, least=1)["rounds"] == 6


def test_clients_that_come_later_cannot_stop_a_run_that_goes_on(federation: Federation) -> None:
    federation.plan, lines = change(federation.plan, ["rounds=8"]), federation.lines(4)
    liars = {number: claiming(lines.clients[number], held=999) for number in range(3)}
    lines.at[10] = lambda: lines.clients.update(liars)
    assert federation.serve(lines)["rounds"] == 8
    assert all(federation.said(f"client {number} says that it has reached round 999") for number in range(3))
    federation.require_agreement(range(4))
