"""Faults on purpose: what a network does to a federation, repeatable from a seed."""

from collections.abc import Callable, Mapping

from baffle.core.messages import RoundRequest
from baffle.core.ports import Transport
from baffle.secure.messages import MaskedRequest, decode_request


class Dropouts:
    """Clients that do not hear a round's request, and so are missing from its sum."""

    def __init__(self, transport: Transport, drops: Callable[[int, int], bool]) -> None:
        self._transport = transport
        self._drops = drops  # round and client → whether it drops

    def exchange(self, requests: Mapping[int, bytes]) -> Mapping[int, bytes]:
        heard = {client: data for client, data in requests.items() if not self._lost(client, data)}
        return self._transport.exchange(heard)

    def _lost(self, client: int, data: bytes) -> bool:
        asked = decode_request(data)
        match asked:
            case RoundRequest():
                return self._drops(asked.round, client)
            case MaskedRequest():
                return self._drops(asked.request.round, client)
            case _:
                return False
