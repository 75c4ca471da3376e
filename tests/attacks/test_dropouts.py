"""A server that lets clients drop out, or says that they did, to get a sum with less noise than clients have paid for.

Each client adds one part in `sharers` of the noise. At every count of survivors, and of clients that stay away before
and after they have sent their vectors, either there is no sum, or it has at least the noise that the ledger counts.
"""

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest

from baffle.aggregation.client.marks import MarksFile
from baffle.aggregation.messages import Advertisement, Hello
from baffle.core.messages import decode
from baffle.errors import MessageError
from baffle.network.member.policy import Policy
from baffle.plan import Plan
from baffle.plan.privacy import certain_sharers
from tests.attacks.hostile_server import HostileServer, RefusedError, Victims, View, keys_of

CLIENTS = 7
FIXED = (
    *(f"federation.clients={CLIENTS}", "federation.batch=8", "federation.weighting=uniform", "rounds=40"),
    *("privacy.noise=30.0", "privacy.clip=1.0"),
)


@pytest.fixture
def attack(tmp_path: Path, tiny: Callable[..., Plan]) -> Callable[..., HostileServer]:
    def make(*settings: str) -> HostileServer:
        plan = tiny(*FIXED, *settings)
        return HostileServer(Victims(tmp_path, keys_of(tmp_path, CLIENTS), plan, Policy(most_epsilon=100.0)))

    return make


def noise_in(server: HostileServer, view: View, opened: int, sent: int, unmasked: int) -> Fraction:
    """The variance of the noise in a sum that the server gets from the first clients: so many of them open the slot, so
    many send their vectors, and so many of those release shares. 0 if there is no sum."""
    private = server.bare.private
    assert private is not None
    try:
        slot = server.opened(view, range(opened), view.present.round)
        requests = slot.requests(dict.fromkeys(range(opened), server.request(view)))
        server.vectors(slot, {client: requests[client] for client in range(sent)})
        server.unmasked(slot, range(unmasked))
    except (RefusedError, MessageError):
        return Fraction(0)
    return sent * private.share


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "floor"), [("on", 3), ("on", 5), ("malicious-server", 3), ("malicious-server", 6)])
def test_at_every_count_of_dropouts_a_sum_has_the_noise_that_was_paid_for(
    attack: Callable[..., HostileServer], mode: str, floor: int
) -> None:
    require_paid_noise(attack(f"secure.mode={mode}", f"secure.floor={floor}"), (3, 5, 6, CLIENTS))


def test_with_few_survivors_a_sum_has_the_noise_that_was_paid_for_or_there_is_none(
    attack: Callable[..., HostileServer],
) -> None:
    require_paid_noise(attack("secure.mode=malicious-server", "secure.floor=3"), (5,))


def require_paid_noise(server: HostileServer, counts: tuple[int, ...]) -> None:
    private, plan = server.bare.private, server.plan
    assert private is not None
    liars = -(-CLIENTS // 3) - 1 if plan.secure.mode == "malicious-server" else 0
    least, tried, sums = certain_sharers(plan) + liars, 0, 0
    for opened in counts:
        for sent in range(1, opened + 1):
            for unmasked in {sent - 1, sent} - {0}:
                view = server.begin()  # of its own, so that nothing is refused because of what was tried before
                noise = noise_in(server, view, opened, sent, unmasked)
                tried += 1
                sums += noise > 0
                honest = noise - liars * private.share  # liars among the survivors add none
                assert honest >= private.variance or noise == 0, (opened, sent, unmasked)
                assert noise or unmasked < opened or opened < least  # without dropouts there is a sum
                forget(server)
    assert 0 < sums < tried


def forget(server: HostileServer) -> None:
    """Clients with empty marks: they would answer only so often about the same weights, in all runs together."""
    for number in server.everybody:
        marks = server.victims.keys[number].marks
        assert all(one.count == 1 for one in MarksFile(marks).ledger.releases())  # paid, also if no sum came of it
        marks.write_bytes(b"")
        server.victims.start(number)


def test_a_slot_of_fewer_members_than_the_noise_needs_is_not_opened(attack: Callable[..., HostileServer]) -> None:
    """Nothing is sent and nothing is paid."""
    server = attack("secure.mode=malicious-server", "secure.floor=3")
    view = server.begin()
    assert noise_in(server, view, 4, 4, 4) == 0
    assert not MarksFile(server.victims.keys[0].marks).ledger.releases()
    assert decode(server.victims.ask(0, Hello(1)), Advertisement)
