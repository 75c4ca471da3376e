"""The secrets of one slot, recovered from the shares that holders released, and the lies that come to light with it."""

import secrets
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from baffle.aggregation.shares import combine, correct, weights
from baffle.errors import AbortError

Shares = Mapping[int, bytes]
"""Holder → its share of one secret."""


@dataclass(frozen=True)
class Dealt:
    """What a dealer said about one of its secrets. `secret`: whether this is the secret. `share`: whether this is the
    share that it dealt to this holder."""

    dealer: int
    secret: Callable[[bytes], bool]
    share: Callable[[int, bytes], bool]


@dataclass
class Recovery:
    """Recovers secrets whose shares have a common threshold. `lies` says who lied in the slot, and how.

    Where all secrets have the same holders (`same_holders`), one set of weights serves them all, and every share goes
    into the secret, so that a wrong one shows. Otherwise a set of weights costs more than all the rest, so only a
    threshold of the shares is used. Which ones is drawn at random, so that no holder can rely on not being among them.
    """

    slot: int
    threshold: int
    same_holders: bool
    lies: dict[int, str] = field(default_factory=dict)
    _weights: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    _ranks: dict[int, int] = field(default_factory=lambda: defaultdict(lambda: secrets.randbits(64)))

    def secret(self, shares: Shares, dealt: Dealt) -> bytes:
        """The secret that the dealer committed to. Aborts if these shares do not give it."""
        self._require_enough(shares, dealt.dealer, "answered")
        secret = self._combined(shares)
        return self._contested(shares, dealt) if not dealt.secret(secret) else secret

    def note_unopened(self, dealer: int, complaints: int, holders: int) -> None:
        """So many holders say that they could not open the dealer's box. Any of them may be the liar, and a share is
        simply missing; but if they are too many for the secret to be recovered at all, either the dealer lies or more
        holders do than any sum could stand."""
        if complaints > holders - self.threshold:
            self._note(dealer, f"its boxes could not be opened by {complaints} of {holders} holders")

    def _contested(self, shares: Shares, dealt: Dealt) -> bytes:
        """The secret without the shares that were never dealt. If the others do not belong together or give another
        secret, the dealer has lied: in what it dealt, or in its own share of its own secret, of which nobody else
        knows. A few such shares can be corrected."""
        right = {holder: share for holder, share in shares.items() if dealt.share(holder, share)}
        for holder in shares.keys() - right.keys():
            self._note(holder, f"it released a share that client {dealt.dealer} had not dealt to it")
        self._require_enough(right, dealt.dealer, "gave the shares they were dealt")
        for secret in self._attempts(right, dealt.dealer):
            if secret is not None and dealt.secret(secret):
                return secret
        raise AbortError(f"client {dealt.dealer} dealt shares that do not give what it had committed to")

    def _attempts(self, right: Shares, dealer: int) -> Iterator[bytes | None]:
        yield self._combined(right)
        self._note(dealer, "it dealt shares that do not give what it had committed to")
        others = {holder: share for holder, share in right.items() if holder != dealer}
        if len(others) >= self.threshold:
            yield self._combined(others)
        yield correct(_points(right), list(right.values()), self.threshold)

    def _require_enough(self, shares: Shares, dealer: int, what: str) -> None:
        if len(shares) < self.threshold:
            raise AbortError(f"{len(shares)} neighbours of client {dealer} {what}, {self.threshold} are needed")

    def _combined(self, shares: Shares) -> bytes:
        looked_at = tuple(shares)
        if not self.same_holders:
            looked_at = tuple(sorted(shares, key=self._ranks.__getitem__)[: self.threshold])
        if looked_at not in self._weights:
            self._weights[looked_at] = weights(_points(looked_at))
        return combine(self._weights[looked_at], [shares[holder] for holder in looked_at])

    def _note(self, client: int, how: str) -> None:
        self.lies.setdefault(client, f"in round {self.slot} {how}")


def _points(holders: Iterable[int]) -> list[int]:
    return [holder + 1 for holder in holders]
