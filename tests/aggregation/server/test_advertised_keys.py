"""Every key has one owner: a client that copies another's is refused, and the owner is not."""

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from baffle.aggregation.context import sign
from baffle.aggregation.messages import Advertisement
from baffle.core.messages import decode, encode
from tests.support.rounds import Rounds

pytestmark = pytest.mark.usefixtures("few_keys")

COPIER, VICTIM = 1, 3

Copy = Callable[[Advertisement, Advertisement], Advertisement]
"""The copier's own list and the victim's → what the copier sends."""
COPIES: dict[str, Copy] = {
    "the whole list": lambda own, known: replace(own, first=known.first, keys=known.keys),
    "one mask key": lambda own, known: replace(own, keys=(*own.keys[:-1], known.keys[-1])),
    "the channel key": lambda own, known: replace(own, channel=known.channel),
    "the channel key as a mask key": lambda own, known: replace(own, keys=(known.channel, *own.keys[1:])),
    "a mask key as the channel key": lambda own, known: replace(own, channel=known.keys[-1]),
}


class Copying:
    """Rounds in which one client, when it is next asked for keys, copies keys that it has heard of."""

    def __init__(self, copy: Copy) -> None:
        self.rounds = Rounds(5)
        self.known: dict[int, Advertisement] = {}
        self.copy: Copy | None = None
        self.rounds.network.spoil = self.spoil
        total, events = self.rounds.play(0)
        assert total is not None, events
        self.copy = copy

    def spoil(self, client: int, phase: str, data: bytes) -> bytes:
        if phase != "keys":
            return data
        own = decode(data, Advertisement)
        if client == COPIER and self.copy:
            federation = self.rounds.federation
            return encode(sign(federation.identities[client], federation.run, self.copy(own, self.known[VICTIM])))
        self.known[client] = own
        return data


@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize("forgotten", [False, True])
def test_a_copier_is_named_and_left_out_and_every_round_has_its_sum(name: str, forgotten: bool) -> None:
    """A victim whose list was forgotten is still the owner: it is asked again, and sends the same keys."""
    copying = Copying(COPIES[name])
    rounds = copying.rounds
    rounds.sum.forget(COPIER)
    if forgotten:
        rounds.sum.forget(VICTIM)
    caught = rounds.play_groups(1)
    assert caught.sums[0] is not None
    assert [client for client, _ in caught.refusals] == [COPIER]
    for number in range(2, 5):
        total, events = rounds.play(number)
        assert total is not None, events
        assert total.contributors == 4
        assert events[VICTIM] == "contributed"
        assert events[COPIER] == f"left out: before round 2 it advertised a key of client {VICTIM} as its own"
        assert not any(COPIER in exchange for exchange in rounds.exchanges)


def test_a_copy_from_before_a_restart_of_the_server_bars_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server has forgotten whose keys they are. The victim's first list proves nothing against it, and with fresh
    keys it is back."""
    monkeypatch.setattr("baffle.aggregation.client.session.KEYS_AT_ONCE", 4)
    copying = Copying(COPIES["the whole list"])
    rounds = copying.rounds
    rounds.sum = rounds.new_server()
    collected = rounds.play_groups(2)
    assert {client for client, _ in collected.refusals} == {VICTIM}
    assert not rounds.sum.faults.barred
    copying.copy = None
    events = {number: rounds.play(number)[1] for number in range(3, 7)}
    assert events[6][VICTIM] == "contributed", events


@pytest.mark.parametrize(
    ("what", "why"),
    [
        (lambda own: replace(own, keys=(own.keys[1], *own.keys[1:])), "advertises a key twice"),
        (lambda own: replace(own, keys=(own.channel, *own.keys[1:])), "advertises a key twice"),
        (lambda own: replace(own, channel=own.channel[:-1] + bytes([own.channel[-1] | 128])), "not written as X25519"),
        (lambda own: replace(own, channel=(2**255 - 19 + 5).to_bytes(32, "little")), "not written as X25519"),
        (lambda own: replace(own, channel=bytes(32)), "nobody can agree with"),
        (lambda own: replace(own, keys=(bytes(32), *own.keys[1:])), "nobody can agree with"),
        (lambda own: replace(own, first=0, keys=own.keys[:1]), "keys of client 2 from slot 0 on"),
        (lambda own: replace(own, sender=0), "keys of client 0 from slot 7 on"),
    ],
)
def test_a_client_whose_keys_cannot_be_used_is_left_out(
    what: Callable[[Advertisement], Advertisement], why: str
) -> None:
    """It must not keep the other clients from opening the slot."""
    rounds = Rounds(4)
    federation = rounds.federation
    rounds.network.spoil = lambda client, phase, data: (
        encode(sign(federation.identities[2], federation.run, what(decode(data, Advertisement))))
        if (client, phase) == (2, "keys")
        else data
    )
    collected = rounds.play_groups(7)
    assert collected.sums[0] is not None
    assert collected.sums[0].contributors == 3
    assert collected.refusals[0][0] == 2
    assert why in collected.events[2]
