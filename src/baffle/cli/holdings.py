"""Who holds what, drawn in a terminal: a line for each client, or for some of them where there are many."""

from dataclasses import dataclass

import numpy as np
from rich.console import Group
from rich.table import Table

from baffle.core.arrays import I64
from baffle.data.dataset import Source
from baffle.data.partition import class_counts

MOST_LINES = 40
"""Clients that are all shown; of more, some are."""

SHOWN = 11
"""Lines for many clients: the smallest, the largest, and those at even steps between them."""

WIDTH = 20
"""Characters of the longest bar."""

LEVELS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Holding:
    """One client's samples, by class, and the domain or the writer that all of them have in common."""

    client: int
    samples: int
    classes: list[int]
    domain: str | None = None
    writer: int | None = None

    @property
    def group(self) -> str:
        return self.domain or ("" if self.writer is None else f"writer {self.writer}")


def holdings(source: Source, shares: list[I64]) -> list[Holding]:
    """What each client holds."""
    counts = class_counts(source.train.labels, shares, source.classes)
    domains, writers = (_common(of, shares) for of in (source.train.domain_of, source.train.writer_of))
    return [
        Holding(client, len(share), row.tolist(), None if domain is None else source.domains[domain], writer)
        for client, (share, row, domain, writer) in enumerate(zip(shares, counts, domains, writers, strict=True))
    ]


def partition_view(held: list[Holding]) -> Group:
    """A few figures, then a line a client: its samples as a bar, its classes as a row of small ones."""
    many = len(held) > MOST_LINES
    shown = held
    if many:
        ranked = sorted(held, key=lambda one: one.samples)
        shown = [ranked[place] for place in np.linspace(0, len(held) - 1, SHOWN).astype(int)]
    most = max(one.samples for one in held)
    grouped = any(one.group for one in shown)
    lines = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for title in ("client", *(["of"] if grouped else []), "samples", "", "classes", "largest"):
        lines.add_column(title, justify="right" if title in ("client", "samples") else "left", overflow="fold")
    for one in shown:
        bar = "█" * max(1, round(WIDTH * one.samples / most))
        whose = [one.group] if grouped else []
        lines.add_row(str(one.client), *whose, f"{one.samples:,}", bar, spark(one.classes), _largest(one))
    remark = f"{SHOWN} of {len(held):,} clients, from the smallest to the largest:" if many else ""
    return Group(_figures(held), remark, lines)


def spark(counts: list[int]) -> str:
    """A character for each class: its share of the client's largest class; a dot where there is none."""
    top = max(counts)
    return "".join(LEVELS[-(-count * len(LEVELS) // top) - 1] if count else "·" for count in counts)


def _figures(held: list[Holding]) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_row("clients", f"{len(held):,}, with {sum(one.samples for one in held):,} samples in all")
    table.add_row("samples", _spread([one.samples for one in held]))
    table.add_row("classes", _spread([sum(count > 0 for count in one.classes) for one in held]))
    for domain in sorted({one.domain for one in held if one.domain}):
        sizes = [one.samples for one in held if one.domain == domain]
        table.add_row(domain, f"{len(sizes):,} clients, {sum(sizes):,} samples")
    return table


def _spread(numbers: list[int]) -> str:
    low, middle, high = np.percentile(numbers, [0, 50, 100])
    return f"{low:,.0f} to {high:,.0f} a client, median {middle:,.0f}"


def _largest(one: Holding) -> str:
    label = int(np.argmax(one.classes))
    return f"{one.classes[label] / one.samples:.0%} are class {label}"


def _common(of: I64 | None, shares: list[I64]) -> list[int | None]:
    """What all of a client's samples have in common; none where they differ."""
    if of is None:
        return [None] * len(shares)
    return [int(of[share[0]]) if (of[share] == of[share[0]]).all() else None for share in shares]
