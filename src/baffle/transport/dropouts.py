"""Simulated clients that do not hear a round's request, and so are missing from its sum."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from baffle.aggregation.messages import MaskedRequest, decode_request
from baffle.core.messages import RoundRequest
from baffle.core.ports import Transport


@dataclass(frozen=True)
class Dropouts:
    """A transport that loses the requests of some rounds to some clients, as `drops(round, client)` says."""

    transport: Transport
    drops: Callable[[int, int], bool]

    def exchange(self, requests: Mapping[int, bytes]) -> Mapping[int, bytes]:
        heard = {client: data for client, data in requests.items() if not self._is_lost(client, data)}
        return self.transport.exchange(heard) if heard else {}

    def _is_lost(self, client: int, data: bytes) -> bool:
        asked = decode_request(data)
        about = asked.request if isinstance(asked, MaskedRequest) else asked
        return isinstance(about, RoundRequest) and self.drops(about.round, client)
