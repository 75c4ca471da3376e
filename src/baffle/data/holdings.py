"""Who holds what: the samples of each client, counted by class."""

from dataclasses import dataclass

from baffle.core.arrays import I64
from baffle.data.dataset import Source
from baffle.data.partition import class_counts


@dataclass(frozen=True)
class Holding:
    """How many samples of each class a client holds; its domain and its writer if all of its samples share them."""

    client: int
    samples: int
    classes: list[int]
    domain: str | None = None
    writer: int | None = None

    @property
    def group(self) -> str:
        return self.domain or ("" if self.writer is None else f"writer {self.writer}")


def holdings(source: Source, shares: list[I64]) -> list[Holding]:
    """The holding of each client, in the clients' order."""
    counts = class_counts(source.train.labels, shares, source.classes)
    domains = _common(source.train.domain_of, shares)
    writers = _common(source.train.writer_of, shares)
    return [
        Holding(client, len(share), classes.tolist(), None if domain is None else source.domains[domain], writer)
        for client, (share, classes, domain, writer) in enumerate(zip(shares, counts, domains, writers, strict=True))
    ]


def _common(group_of: I64 | None, shares: list[I64]) -> list[int | None]:
    """For each client, the group that all of its samples belong to; None if they belong to several."""
    if group_of is None:
        return [None] * len(shares)
    return [int(group_of[share[0]]) if (group_of[share] == group_of[share[0]]).all() else None for share in shares]
