"""Every key has one owner: a client that copies another's is refused, and the owner is not."""

import time
from collections.abc import Callable, Iterator

import pytest
from msgspec.structs import replace

from baffle.aggregation.context import sign
from baffle.aggregation.messages import Advertisement
from baffle.aggregation.server.advertised_keys import AdvertisedKeys
from baffle.core.messages import decode, encode
from baffle.errors import RefusalError
from tests.support.rounds import Rounds

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


@pytest.fixture(autouse=True, scope="module")
def _few_keys() -> Iterator[None]:
    """Lists of keys for few slots are quicker to make."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("baffle.aggregation.client.session.KEYS_AT_ONCE", 4)
        yield


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
        if phase != "hello":
            return data
        own = decode(data, Advertisement)
        if client == COPIER and self.copy:
            federation = self.rounds.federation
            return encode(sign(federation.identities[client], federation.run, self.copy(own, self.known[VICTIM])))
        self.known[client] = own
        return data


@pytest.mark.parametrize("name", COPIES)
def test_a_copier_is_named_and_left_out_and_every_round_has_its_sum(name: str) -> None:
    copying = Copying(COPIES[name])
    rounds = copying.rounds
    rounds.sum.forget(COPIER)
    caught = rounds.play_groups(1)
    assert caught.sums[0] is not None
    assert [client for client, _ in caught.refusals] == [COPIER]
    for number in range(2, 8):
        total, events = rounds.play(number)
        assert total is not None, events
        assert total.contributors == 4
        assert events[COPIER] == f"left out: before round 2 it advertised a key of client {VICTIM} as its own"
        assert not any(COPIER in exchange for exchange in rounds.exchanges)


def test_a_victim_whose_list_was_forgotten_is_still_the_owner() -> None:
    """It is asked for keys again, and sends the same ones, after the copier has tried them."""
    copying = Copying(COPIES["the whole list"])
    rounds = copying.rounds
    rounds.sum.forget(COPIER)
    rounds.sum.forget(VICTIM)
    assert [client for client, _ in rounds.play_groups(1).refusals] == [COPIER]
    total, events = rounds.play(2)
    assert total is not None, events
    assert events[VICTIM] == "contributed"


def test_who_copies_from_before_a_restart_of_the_server_bars_nobody() -> None:
    """The server has forgotten whose keys they are. The victim's first list proves nothing against it, and with fresh
    keys it is back."""
    copying = Copying(COPIES["the whole list"])
    rounds = copying.rounds
    rounds.sum = rounds.new_server()
    collected = rounds.play_groups(2)
    assert {client for client, _ in collected.refusals} == {VICTIM}
    assert not rounds.sum._keys.barred
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
    ],
)
def test_keys_that_repeat_or_are_written_otherwise_are_refused(
    what: Callable[[Advertisement], Advertisement], why: str
) -> None:
    rounds = Rounds(4)
    federation = rounds.federation
    rounds.network.spoil = lambda client, phase, data: (
        encode(sign(federation.identities[2], federation.run, what(decode(data, Advertisement))))
        if (client, phase) == (2, "hello")
        else data
    )
    collected = rounds.play_groups(0)
    assert collected.sums[0] is not None
    assert collected.refusals[0][0] == 2
    assert why in collected.events[2]


def test_owners_of_many_keys_are_found_quickly() -> None:
    keys = AdvertisedKeys(bytes(32), {})
    lists = {c: tuple((c * 129 + i).to_bytes(32, "big") for i in range(129)) for c in range(1000)}
    began = time.process_time()
    for _ in range(2):
        for client, own in lists.items():
            keys._own(client, own, 0)
    assert time.process_time() - began < 2
    assert len(keys._owners) == 129_000
    with pytest.raises(RefusalError, match="client 5 advertises a key that client 7 advertised before"):
        keys._own(5, (*lists[5][:-1], lists[7][60]), 0)
    assert keys._owners[lists[5][3]] == 5
