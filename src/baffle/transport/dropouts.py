"""Simulated dropouts: clients that do not receive a round's request, and so are missing from its sum."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from baffle.aggregation.messages import MaskedRequest, decode_request
from baffle.core.messages import RoundRequest
from baffle.core.ports import Transport


@dataclass(frozen=True)
class Dropouts:
    """A transport that loses a round's request to a client if `drops(round, client)` is true."""

    transport: Transport
    drops: Callable[[int, int], bool]

    def exchange(self, requests: Mapping[int, bytes]) -> Mapping[int, bytes]:
        kept = {client: data for client, data in requests.items() if not self._is_lost(client, data)}
        return self.transport.exchange(kept) if kept else {}

    def _is_lost(self, client: int, data: bytes) -> bool:
        request = decode_request(data)
        if isinstance(request, MaskedRequest):
            request = request.request
        return isinstance(request, RoundRequest) and self.drops(request.round, client)
