"""Dropouts lose the chosen requests of rounds, and nothing else."""

from collections.abc import Mapping

from baffle.aggregation.messages import Agree, Hello, MaskedRequest, Request
from baffle.core.messages import CatchUp, RoundRequest, encode
from baffle.transport.dropouts import Dropouts

ABOUT = RoundRequest(3, bytes(32), bytes(32), bytes(32), CatchUp("outcomes", 0, ()))


class Echo:
    """Answers every request with itself."""

    def exchange(self, requests: Mapping[int, bytes]) -> Mapping[int, bytes]:
        assert requests, "an exchange with nobody"
        return requests


def test_a_dropout_misses_the_request_of_its_round_and_nothing_else() -> None:
    network = Dropouts(Echo(), lambda number, client: (number, client) == (3, 1))

    def reached(request: Request) -> list[int]:
        return list(network.exchange(dict.fromkeys((0, 1, 2), encode(request))))

    assert reached(ABOUT) == reached(MaskedRequest(ABOUT, (0, 1, 2), bytes(32), b"")) == [0, 2]
    assert reached(Hello(3)) == reached(Agree(3, (0, 1, 2), ())) == [0, 1, 2]


def test_a_round_that_reaches_nobody_has_no_replies() -> None:
    assert Dropouts(Echo(), lambda _number, _client: True).exchange({0: encode(ABOUT)}) == {}
