"""Limits on unauthenticated connections: few places, and addresses that keep failing are shut out."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, strategies as st

from baffle.network.link.door import FAILURES, FORGIVEN, KEPT, KNOWN_FOR, MOST_ADDRESSES, UNDISTURBED, Door, origin


@dataclass(eq=False)
class Guest:
    address: str
    dropped: bool = False

    def drop(self) -> None:
        self.dropped = True


@dataclass
class House:
    """A door with a clock that the test turns."""

    clients: int = 8
    time: float = 1000.0
    door: Door = field(init=False)

    def __post_init__(self) -> None:
        self.door = Door(self.clients, lambda: self.time)

    def guest(self, address: str) -> Guest | None:
        """A new connection from an address; None if it is turned away."""
        if not self.door.admits(address):
            return None
        guest = Guest(address)
        self.door.enter(guest)
        return guest

    def client(self, address: str) -> Guest:
        """A connection that proves to be a client."""
        guest = self.guest(address)
        assert guest
        self.door.prove(guest)
        return guest

    @property
    def inside(self) -> set[object]:
        return {*self.door._strangers, *self.door._familiar}

    def fail(self, address: str, times: int, *, failed: bool = True) -> None:
        for _ in range(times):
            guest = self.guest(address)
            assert guest
            self.door.leave(guest, failed=failed)


def test_an_address_that_fails_often_is_shut_out_until_its_failure_count_decays() -> None:
    house = House()
    house.fail("1.1.1.1", FAILURES)
    assert house.guest("1.1.1.1") is None
    assert house.guest("2.2.2.2")
    house.time += FORGIVEN
    house.fail("1.1.1.1", 1)
    assert house.guest("1.1.1.1") is None
    house.time += FORGIVEN * FAILURES + 1
    house.fail("1.1.1.1", FAILURES)


def test_behind_a_proxy_no_address_is_shut_out() -> None:
    """Every connection has the proxy's address: robots that look for other pages must not lock the clients out."""
    house = House()
    house.door.behind_proxy = True
    house.fail("127.0.0.1", 10 * FAILURES)
    assert house.guest("127.0.0.1")


def test_an_address_stays_open_until_some_time_after_its_last_client_has_gone() -> None:
    house = House()
    for _ in range(2):
        house.client("1.1.1.1")
    house.fail("1.1.1.1", 3 * FAILURES)
    house.time += 2 * KNOWN_FOR  # a client that stays connected keeps its address open, however long ago it came
    house.fail("1.1.1.1", FAILURES)
    house.door.part("1.1.1.1")
    house.time += 2 * KNOWN_FOR
    house.fail("1.1.1.1", 2 * FAILURES)
    house.door.part("1.1.1.1")
    house.time += KNOWN_FOR - 1
    house.fail("1.1.1.1", 2 * FAILURES)
    house.time += 1
    assert house.guest("1.1.1.1") is None


def test_the_address_that_holds_most_places_makes_room() -> None:
    house = House()
    crowd = [house.guest("6.6.6.6") for _ in range(house.door.places)]
    newcomer = house.guest("1.1.1.1")
    assert newcomer
    assert not newcomer.dropped
    assert [guest.dropped for guest in crowd if guest] == [True] + [False] * (house.door.places - 1)


def test_an_address_cannot_hurry_its_own_visitors_out() -> None:
    house = House()
    first = house.guest("1.1.1.1")
    crowd = [house.guest("1.1.1.1") for _ in range(house.door.places - 1)]
    assert all(crowd)
    assert house.guest("1.1.1.1") is None
    assert first
    assert not first.dropped
    house.time += UNDISTURBED + 0.01
    assert house.guest("1.1.1.1")
    assert first.dropped


def test_clients_that_all_come_at_once_do_not_push_each_other_out() -> None:
    house = House()
    inside = [house.guest(f"10.0.0.{number}") for number in range(house.door.places)]
    assert [house.guest(f"10.0.1.{number}") for number in range(20)] == [None] * 20
    assert not any(guest.dropped for guest in inside if guest)
    for number in range(20):  # nor is it held against them that they were turned away
        assert not house.door._failures_of(f"10.0.1.{number}")


@pytest.mark.parametrize("addresses", [1, 300])
def test_a_known_address_gets_in_however_many_knock(addresses: int) -> None:
    """N8: 400 connections a second, from the client's own address or from many others, for half a minute."""
    house = House()
    house.client("10.0.0.0")
    house.door.part("10.0.0.0")
    for moment in range(30 * 400):
        house.time += 1 / 400
        house.guest(f"10.0.0.{moment % addresses}")
        if moment % 173 == 0:
            newcomer = house.guest("10.0.0.0")
            assert newcomer
            for number in range(350):  # most of a second, in which it must prove its key
                house.time += 1 / 400
                house.guest(f"10.0.0.{number % addresses}")
            assert not newcomer.dropped
            house.door.prove(newcomer)
            house.door.part("10.0.0.0")


def test_memory_is_bounded_however_many_addresses_come() -> None:
    house = House()
    for number in range(MOST_ADDRESSES + 100):
        address = f"a{number}"
        house.fail(address, 1)
        house.client(address)
        house.door.part(address)
    assert len(house.door._failures) == len(house.door._known) == MOST_ADDRESSES
    assert not house.door._connected
    assert not house.inside


@pytest.mark.parametrize(
    ("address", "counted"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
        ("2001:db8:1:2::9", "2001:db8:1:2::"),
        ("fe80::1%eth0", "fe80::"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
    ],
)
def test_an_ipv6_network_counts_as_one_address(address: str, counted: str) -> None:
    assert origin(address) == counted


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["come", "fail", "prove", "part", "wait"]))))
def test_there_are_never_more_visitors_than_places(steps: list[tuple[str, str]]) -> None:
    house = House()
    guests: list[Guest] = [guest for _ in range(house.door.places - 3) if (guest := house.guest("z"))]
    connected: list[str] = []
    for address, step in steps:
        match step:
            case "come":
                if guest := house.guest(address):
                    guests.append(guest)
            case "fail" if guests:
                house.door.leave(guests.pop(), failed=True)
            case "prove" if guests and not guests[-1].dropped:
                house.door.prove(guests[-1])
                connected.append(guests.pop().address)
            case "part" if connected:
                house.door.part(connected.pop())
            case "wait":
                house.time += 0.6
        assert len(house.door._strangers) <= house.door.places
        assert len(house.inside) <= house.door.places + KEPT
        assert sum(house.door._connected.values()) == len(connected)
        assert house.inside == {guest for guest in guests if not guest.dropped}
