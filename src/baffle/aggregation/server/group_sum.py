"""One group's secure sum on its way through a round."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from baffle.aggregation.server.slot import ServerSlot
from baffle.aggregation.server.traffic import Traffic
from baffle.core.messages import RoundRequest
from baffle.core.ports import CONTRIBUTED, MISSING
from baffle.errors import AbortError, MessageError

T = TypeVar("T")


@dataclass
class GroupSum:
    """The group's requests, its slot once one is open, and why its sum was abandoned, if it was."""

    requests: Mapping[int, RoundRequest]
    slot: ServerSlot | None = None
    with_keys: Sequence[int] = ()
    fault: str = ""

    @property
    def request(self) -> RoundRequest:
        """Any one of the requests: all are about the same round and the same weights."""
        return next(iter(self.requests.values()))

    @property
    def round(self) -> int:
        return self.request.round

    def open_slot(self) -> ServerSlot:
        if self.slot is None:
            raise AbortError(f"{len(self.with_keys)} of {len(self.requests)} clients have keys, too few for a sum")
        return self.slot

    def present(self) -> Iterable[int]:
        """The clients that have done their part so far."""
        if self.slot is None:
            return self.with_keys
        return self.slot.vectors if self.slot.participants else self.slot.sealed

    def events(self, traffic: Traffic, barred: Mapping[int, str]) -> dict[int, str]:
        """How each client ended the round. `barred` says why some are not asked at all."""
        first_refusals = dict(reversed(traffic.refusals))
        reasons = first_refusals | {client: f"left out: {why}" for client, why in barred.items()}
        present = set(self.present())
        return {
            client: (self.fault or CONTRIBUTED) if client in present else reasons.get(client, MISSING)
            for client in self.requests
        }


def continue_each(sums: list[GroupSum], step: Callable[[GroupSum], T]) -> dict[int, T]:
    """Take one step with every group that has not been abandoned, and return the results by the group's index. A group
    whose step fails is abandoned; the others go on."""
    results: dict[int, T] = {}
    for index, group_sum in enumerate(sums):
        if not group_sum.fault:
            try:
                results[index] = step(group_sum)
            except MessageError as fault:
                group_sum.fault = f"the sum was abandoned: {fault}"
    return results
