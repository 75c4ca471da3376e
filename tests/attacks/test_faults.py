"""A client that breaks the rules costs the others little, however often it does so."""

from collections.abc import Callable

from baffle.network.member.policy import Policy
from tests.attacks.hostile_server import HostileServer, refused


def test_a_server_does_not_choose_how_few_clients_lie(attack: Callable[..., HostileServer]) -> None:
    """With one liar among ten, two groups of five are sound. It is not the server's to say that there is only one."""
    settings = ("secure.mode=malicious-server", "secure.groups=2", "secure.liars=1")
    server = attack(*settings, clients=10)
    server.introductions([0])  # the owner has pinned the plan
    for policy, allowed in ((Policy(without_privacy=True), False), (Policy(without_privacy=True, least_liars=1), True)):
        server.victims.allow(policy, pinned=False)
        if allowed:
            server.introductions([0])
            continue
        with refused(server, 0, "secure.liars is 1 in the server's plan, least_liars asks for at least 3 of 10"):
            server.introductions([0])
