"""A partition drawn in a terminal: one line per client, or a selection of lines for a large federation."""

from dataclasses import dataclass

import numpy as np
from rich.console import Group
from rich.table import Table

from baffle.core.arrays import I64
from baffle.data.dataset import Source
from baffle.data.partition import class_counts

MOST_LINES = 40
"""Up to this many clients, each gets a line; of more, a selection does."""

SHOWN = 11
"""Lines of a selection: the smallest client, the largest, and those at even steps between them."""

WIDTH = 20
"""Characters of the longest bar."""

LEVELS = "▁▂▃▄▅▆▇█"


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


def partition_view(held: list[Holding]) -> Group:
    """A few figures, then the clients' lines: a bar for the samples, and a small bar for each class."""
    many = len(held) > MOST_LINES
    shown = held
    if many:
        ranked = sorted(held, key=lambda holding: holding.samples)
        shown = [ranked[place] for place in np.linspace(0, len(held) - 1, SHOWN).astype(int)]
    most = max(holding.samples for holding in held)
    grouped = any(holding.group for holding in shown)
    lines = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for title in ("client", *(["of"] if grouped else []), "samples", "", "classes", "largest"):
        lines.add_column(title, justify="right" if title in ("client", "samples") else "left", overflow="fold")
    for holding in shown:
        bar = "█" * max(1, round(WIDTH * holding.samples / most))
        cells = [str(holding.client), f"{holding.samples:,}", bar, spark(holding.classes), _largest(holding)]
        if grouped:
            cells.insert(1, holding.group)
        lines.add_row(*cells)
    remark = f"{SHOWN} of {len(held):,} clients, from the smallest to the largest:" if many else ""
    return Group(_figures(held), remark, lines)


def spark(counts: list[int]) -> str:
    """A character for each class, as high as its share of the client's largest class; a dot for none."""
    top = max(counts)
    return "".join(LEVELS[-(-count * len(LEVELS) // top) - 1] if count else "·" for count in counts)


def _figures(held: list[Holding]) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_row("clients", f"{len(held):,}, with {sum(holding.samples for holding in held):,} samples in all")
    table.add_row("samples", _spread([holding.samples for holding in held]))
    table.add_row("classes", _spread([sum(count > 0 for count in holding.classes) for holding in held]))
    for domain in sorted({holding.domain for holding in held if holding.domain}):
        sizes = [holding.samples for holding in held if holding.domain == domain]
        table.add_row(domain, f"{len(sizes):,} clients, {sum(sizes):,} samples")
    return table


def _spread(numbers: list[int]) -> str:
    low, middle, high = np.percentile(numbers, [0, 50, 100])
    return f"{low:,.0f} to {high:,.0f} a client, median {middle:,.0f}"


def _largest(holding: Holding) -> str:
    label = int(np.argmax(holding.classes))
    return f"{holding.classes[label] / holding.samples:.0%} are class {label}"


def _common(group_of: I64 | None, shares: list[I64]) -> list[int | None]:
    """For each client, the group that all of its samples belong to; None if they belong to several."""
    if group_of is None:
        return [None] * len(shares)
    return [int(group_of[share[0]]) if (group_of[share] == group_of[share[0]]).all() else None for share in shares]
