"""Dropouts: some clients do not hear some rounds, and nothing else is lost."""

from collections.abc import Mapping

from baffle.aggregation.messages import Agree, Hello, MaskedRequest, Request
from baffle.core.messages import CatchUp, RoundRequest, encode
from baffle.transport.dropouts import Dropouts

ABOUT = RoundRequest(3, 3, bytes(32), bytes(32), CatchUp("outcomes", 0, ()))


class Echo:
    """Answers every request with itself."""

    def exchange(self, requests: Mapping[int, bytes]) -> Mapping[int, bytes]:
        assert requests, "nobody is asked"
        return requests


def test_dropouts_do_not_hear_the_request_of_a_round_and_nothing_else_is_lost() -> None:
    network = Dropouts(Echo(), lambda number, client: (number, client) == (3, 1))

    def heard(asked: Request) -> list[int]:
        return list(network.exchange(dict.fromkeys((0, 1, 2), encode(asked))))

    assert heard(ABOUT) == heard(MaskedRequest(ABOUT, (0, 1, 2), bytes(32), b"")) == [0, 2]
    assert heard(Hello(3)) == heard(Agree(3, (0, 1, 2), ())) == [0, 1, 2]


def test_a_round_that_nobody_hears_gives_no_reply() -> None:
    assert Dropouts(Echo(), lambda _number, _client: True).exchange({0: encode(ABOUT)}) == {}
