"""A real link and real lines over loopback, with TLS."""

from tests.support.links import Client, Keys, answer_to, linked, question


def test_replies_come_back_in_the_order_of_the_requests(keys: Keys) -> None:
    with (
        linked(keys) as at,
        Client(at.address, keys.clients[0]),
        Client(at.address, keys.clients[1]),
        Client(at.address, keys.clients[2]),
    ):
        at.until_present(0, 1, 2)
        replies = at.ask(2, 0, 1)
    assert replies == dict.fromkeys((2, 0, 1), answer_to(question(0)))
    assert list(replies) == [2, 0, 1]
