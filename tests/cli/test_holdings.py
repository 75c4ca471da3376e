"""The drawing of a partition."""

import io

import numpy as np
import pytest
from rich.console import Console

from baffle.cli.holdings import MOST_LINES, SHOWN, partition_view, spark
from baffle.data.dataset import Dataset, Source
from baffle.data.holdings import Holding, holdings


def _drawn(held: list[Holding]) -> list[str]:
    screen = io.StringIO()
    Console(file=screen, width=120).print(partition_view(held))
    return screen.getvalue().splitlines()


def _source() -> Source:
    labels = np.array([0, 0, 1, 2, 2, 2])
    domain_of = np.array([0, 0, 0, 1, 1, 1])
    writer_of = np.array([5, 5, 5, 5, 9, 9])
    data = Dataset(np.zeros((6, 1)), labels, lambda x: x, domain_of=domain_of, writer_of=writer_of)
    return Source(data, data, 4, ("photo", "sketch"))


def test_a_client_has_the_domain_and_writer_that_all_its_samples_share() -> None:
    first, second, mixed = holdings(_source(), [np.array([0, 2]), np.array([4, 5, 3]), np.array([1, 4])])
    assert first == Holding(0, 2, [1, 1, 0, 0], "photo", 5)
    assert (second.classes, second.domain, second.writer) == ([0, 0, 3, 0], "sketch", None)
    assert (mixed.classes, mixed.domain, mixed.writer, mixed.group) == ([1, 0, 1, 0], None, None, "")
    assert Holding(0, 1, [1], None, 7).group == "writer 7"


@pytest.mark.parametrize(
    ("counts", "expected"), [([0, 1, 8], "·▁█"), ([8, 7, 4, 1], "█▇▄▁"), ([1, 1000], "▁█"), ([5], "█")]
)
def test_even_one_sample_of_a_class_is_visible(counts: list[int], expected: str) -> None:
    assert spark(counts) == expected


def test_domains_are_summed_up() -> None:
    shown = _drawn(holdings(_source(), [np.array([0]), np.array([1, 2]), np.array([3, 4, 5])]))
    assert any(line.split()[:1] == ["photo"] and "2 clients, 3 samples" in line for line in shown)
    assert shown[-1].split()[:3] == ["2", "sketch", "3"]
    assert "100% are class 2" in shown[-1]


@pytest.mark.parametrize(("clients", "lines"), [(MOST_LINES, MOST_LINES), (MOST_LINES + 1, SHOWN), (5000, SHOWN)])
def test_of_many_clients_a_selection_is_shown(clients: int, lines: int) -> None:
    shown = _drawn([Holding(i, 1 + i, [1 + i]) for i in reversed(range(clients))])
    body = shown[next(i for i, line in enumerate(shown) if line.split()[:2] == ["client", "samples"]) + 1 :]
    assert len(body) == lines
    assert any("of" in line and "from the smallest" in line for line in shown) == (lines == SHOWN)
    if lines == SHOWN:
        assert body[0].split()[0] == "0"
        assert body[-1].split()[0] == str(clients - 1)
