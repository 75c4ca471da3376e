"""A partition drawn in a terminal: one line per client, or a selection of lines for a large federation."""

import numpy as np
from rich.console import Group
from rich.table import Table

from baffle.data.holdings import Holding

MOST_LINES = 40
"""Up to this many clients, each gets a line; of more, a selection does."""

SHOWN = 11
"""Lines of a selection: the smallest client, the largest, and those at even steps between them."""

WIDTH = 20
"""Characters of the longest bar."""

LEVELS = "▁▂▃▄▅▆▇█"


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
    top = max(counts, default=0)
    return "".join(LEVELS[-(-count * len(LEVELS) // top) - 1] if count else "·" for count in counts)


def _figures(held: list[Holding]) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_row("clients", f"{len(held):,}, with {sum(holding.samples for holding in held):,} samples in all")
    table.add_row("samples", _spread([holding.samples for holding in held]))
    if held[0].classes:
        table.add_row("classes", _spread([sum(count > 0 for count in holding.classes) for holding in held]))
    for domain in sorted({holding.domain for holding in held if holding.domain}):
        sizes = [holding.samples for holding in held if holding.domain == domain]
        table.add_row(domain, f"{len(sizes):,} clients, {sum(sizes):,} samples")
    return table


def _spread(numbers: list[int]) -> str:
    low, middle, high = np.percentile(numbers, [0, 50, 100])
    return f"{low:,.0f} to {high:,.0f} a client, median {middle:,.0f}"


def _largest(holding: Holding) -> str:
    if not sum(holding.classes):
        return ""
    label = int(np.argmax(holding.classes))
    return f"{holding.classes[label] / sum(holding.classes):.0%} are class {label}"
