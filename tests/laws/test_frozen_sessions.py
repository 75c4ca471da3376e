"""A session that is frozen and thawed between any two messages sends the same bytes as one that never was."""

import random
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given, settings, strategies as st
from msgspec.structs import replace

from baffle.aggregation.client.marks import MarksFile
from baffle.aggregation.client.session import ClientSession, FrozenSession
from baffle.aggregation.messages import Agree, Unmask
from baffle.core.messages import decode, encode
from baffle.errors import MessageError, RefusalError
from tests.support.federation import Federation, about
from tests.support.rounds import Rounds

N, ROUNDS = 4, 3
PHASES = ["keys", "share", "vector", "agree", "unmask"]

Moments = set[tuple[int, str, int]]
moments = st.sets(st.tuples(st.integers(0, N - 1), st.sampled_from(PHASES), st.integers(0, ROUNDS - 1)), max_size=30)
"""Client, phase, round: the moments at which a client's session is frozen and a thawed one goes on."""


class _Drawn:
    """Draws the keys for channels from the same stream as everything else."""

    from_private_bytes = staticmethod(X25519PrivateKey.from_private_bytes)

    @staticmethod
    def generate() -> X25519PrivateKey:
        return X25519PrivateKey.from_private_bytes(secrets.token_bytes(32))


@contextmanager
def the_same_chance() -> Iterator[None]:
    """Inside it, all random draws come from one stream that begins anew."""
    stream = random.Random(7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("secrets.token_bytes", stream.randbytes)
        patch.setattr("baffle.aggregation.client.peers.X25519PrivateKey", _Drawn)
        # With two keys, lists run out within a few rounds.
        patch.setattr("baffle.aggregation.client.session.KEYS_AT_ONCE", 2)
        yield


IDENTITIES = [Ed25519PrivateKey.generate() for _ in range(N)]


def thawed(
    federation: Federation, client: int, frozen: bytes | None = None, memory: MarksFile | None = None
) -> ClientSession:
    """A session from a frozen one; without any, from the client's own as it is now."""
    known = federation.identities[client], federation.directory, federation.run, federation.policy
    frozen = federation.sessions[client].frozen() if frozen is None else frozen
    return ClientSession(client, *known, memory=memory, frozen=frozen)


def said(agreement: bool, moments: Moments, lost: Moments) -> list[tuple[int, str, bytes]]:
    """Everything that clients send in a few rounds, with some sessions frozen and thawed and some replies lost."""
    words: list[tuple[int, str, bytes]] = []
    with the_same_chance():
        rounds = Rounds(N, agreement=agreement)
        federation = rounds.federation
        federation.identities = dict(enumerate(IDENTITIES))
        federation.directory = {c: identity.public_key().public_bytes_raw() for c, identity in enumerate(IDENTITIES)}
        federation.sessions = {client: federation.new_session(client) for client in range(N)}
        rounds.sum = rounds.new_server()
        for number in range(ROUNDS):

            def freeze_and_thaw(client: int, phase: str, number: int = number) -> bool:
                if (client, phase, number) in moments:
                    federation.sessions[client] = thawed(federation, client)
                return False

            def overheard(client: int, phase: str, data: bytes, number: int = number) -> bytes | None:
                words.append((client, phase, data))
                return None if (client, phase, number) in lost else data

            rounds.network.deaf, rounds.network.spoil = freeze_and_thaw, overheard
            rounds.play(number)
    return words


@given(
    st.booleans(), moments, st.sets(st.tuples(st.integers(0, N - 1), st.sampled_from(PHASES), st.just(1)), max_size=2)
)
@settings(max_examples=40, deadline=None)
def test_a_frozen_session_sends_the_same(agreement: bool, moments: Moments, lost: Moments) -> None:
    assert said(agreement, moments, lost) == said(agreement, set(), lost)


@pytest.mark.parametrize("agreement", [False, True])
def test_so_does_one_that_is_frozen_before_every_message(agreement: bool) -> None:
    always = {(client, phase, number) for client in range(N) for phase in PHASES for number in range(ROUNDS)}
    words = said(agreement, always, set())
    assert words == said(agreement, set(), set())
    assert {phase for _, phase, _ in words} == set(PHASES) - ({"agree"} if not agreement else set())


def test_nothing_is_lost_at_any_stage_of_a_slot() -> None:
    """A thawed client gives the same answer to the same request."""
    federation = Rounds(4, agreement=True).federation

    def require_whole() -> None:
        session, again = federation.sessions[1], thawed(federation, 1)
        one, other = (decode(each.frozen(), FrozenSession) for each in (session, again))
        assert replace(one, memory=b"") == replace(other, memory=b"")
        assert again.marks == session.marks
        assert again._memory.released(about(0).weights_hash) == session._memory.released(about(0).weights_hash)

    require_whole()
    federation.advertise()
    require_whole()
    server, _ = federation.until_masked(about(0))
    require_whole()
    survivors = Agree(0, (0, 1, 2, 3), ())
    signatures = {client: session.agree(survivors).signature for client, session in federation.sessions.items()}
    assert thawed(federation, 1).agree(survivors).signature == signatures[1]
    with pytest.raises(RefusalError, match="other survivors"):
        thawed(federation, 1).unmask(Unmask(0, (1, 2, 3), (0,)))
    unmask = Unmask(0, (0, 1, 2, 3), (), (0, 1, 2, 3), b"".join(signatures.values()))
    unmasked = federation.sessions[1].unmask(unmask)
    require_whole()
    assert thawed(federation, 1).unmask(unmask) == unmasked
    assert thawed(federation, 1).seal(federation.opening(0, 1)).boxes == b"".join(server.sealed[1])


@given(st.integers(0, 10**6), st.binary(max_size=3))
@settings(deadline=None)
def test_a_damaged_session_is_refused_or_decodes_whole(place: int, put: bytes) -> None:
    """Damage raises only our own errors. A damaged key or seed cannot be noticed."""
    federation = Federation(2)
    frozen = federation.sessions[0].frozen()
    place %= len(frozen)
    damaged = frozen[:place] + put + frozen[place + len(put) :]
    try:
        assert encode(decode(damaged, FrozenSession)) == damaged
        thawed(federation, 0, damaged)
    except MessageError:
        pass


def test_an_old_copy_with_durable_marks_answers_nothing_again(tmp_path: Path) -> None:
    """Two processes started from one frozen session give one answer. Two signatures from one client would let a lying
    server get two sums."""
    federation, path = Rounds(3, agreement=True).federation, tmp_path / "marks"
    path.touch()
    session = federation.sessions[0] = federation.new_session(0, MarksFile(path))
    federation.advertise()

    def old(frozen: bytes) -> ClientSession:
        return thawed(federation, 0, frozen, MarksFile(path))

    frozen = session.frozen()
    server = federation.sealed(0)
    with pytest.raises(RefusalError, match="not after slot 0"):
        old(frozen).seal(federation.opening(0, 0))
    asked, frozen = server.requests(dict.fromkeys(server.sealed, about(0))), session.frozen()
    federation.masked(server, asked, [0, 1, 2])
    other = server.requests(dict.fromkeys(server.sealed, about(0, weights_hash=bytes(32))))[0]
    with pytest.raises(RefusalError, match="not after slot 0"):
        old(frozen).mask(other, lambda: pytest.fail("computed"))
    survivors, frozen = Agree(0, (0, 1, 2), ()), session.frozen()
    signatures = {client: each.agree(survivors).signature for client, each in federation.sessions.items()}
    with pytest.raises(RefusalError, match="signed for in slot 0"):
        old(frozen).agree(survivors)
    assert session.agree(survivors).signature == signatures[0]
    unmask, frozen = Unmask(0, (0, 1, 2), (), (0, 1, 2), b"".join(signatures.values())), session.frozen()
    session.unmask(unmask)
    with pytest.raises(RefusalError, match="round 0 is not after round 0"):
        old(frozen).unmask(unmask)
