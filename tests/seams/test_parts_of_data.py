"""A server and its clients on machines that each hold only their part of the data."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from baffle.data.sources import load as load_data
from baffle.errors import DataError
from baffle.journal.audit import verify
from baffle.network.keys.folders import ClientKeys
from baffle.network.member.equipment import with_plan
from baffle.network.member.member import Member
from baffle.network.member.policy import Policy
from baffle.network.server.serve import serve
from baffle.plan import Plan
from baffle.server.recorder import Summary
from baffle.simulation import repeat
from tests.support.lines_in_memory import LinesInMemory, new_keys

CLIENTS = 3

WHOLE = Policy(largest_batch=1.0)
"""Each client has few samples, and a round uses all of them."""


def _usps(folder: Path, *parts: str) -> Path:
    """USPS-like images in which every class is bright in another row."""
    labels = np.arange(40, dtype=np.uint8) % 10
    images = np.zeros((40, 16, 16), np.uint8)
    images[np.arange(40), labels] = 255
    (folder / "usps").mkdir(parents=True)
    arrays = {name: array for part in parts for name, array in ((f"x_{part}", images), (f"y_{part}", labels))}
    np.savez(folder / "usps" / "usps.npz", **arrays)  # type: ignore[arg-type]
    return folder


def _clients(keys: Sequence[ClientKeys], folder: Path, data: Path, stop_at: int | None = None) -> LinesInMemory:
    """Clients in memory, each with its part of the data, and a network that breaks at an exchange."""

    def member(key: ClientKeys) -> Member:
        number = key.number
        equip = with_plan(number, data, part=True)
        return Member(key, folder / f"state-{number}", equip, policy=WHOLE)

    def stop(exchange: int) -> None:
        if exchange == stop_at:
            raise InterruptedError

    return LinesInMemory({key.number: member(key).answer for key in keys}, before=stop)


def _serve(plan: Plan, folder: Path, server_data: Path, clients_data: Path) -> tuple[Summary, list[str]]:
    """A whole run over a network in memory: its summary, and what the server reported."""
    keys, reports = new_keys(folder, CLIENTS), list[str]()
    nodes = _clients(keys, folder, clients_data)
    summary = serve(plan, folder / "run", nodes, keys[0].roster, data=server_data, tell=reports.append)
    assert verify(folder / "run").weights_sha256 == summary["weights_sha256"]
    return summary, reports


@pytest.fixture
def plan(tiny: Callable[..., Plan]) -> Plan:
    return tiny('task.data="usps"', 'secure.mode="on"', "federation.batch=0", "rounds=3")


def test_each_part_is_read_by_itself(tmp_path: Path) -> None:
    only_test = load_data("usps", _usps(tmp_path / "server", "test"))
    assert len(only_test.test) == 40
    with pytest.raises(DataError, match=r"usps\.npz holds no x_train"):
        len(only_test.train)
    assert len(load_data("usps", _usps(tmp_path / "client", "train")).train) == 40


def test_a_server_needs_the_test_set_alone_and_its_clients_their_samples_alone(plan: Plan, tmp_path: Path) -> None:
    summary, reports = _serve(plan, tmp_path, _usps(tmp_path / "server", "test"), _usps(tmp_path / "client", "train"))
    assert 0 <= summary["test_accuracy"] <= 1
    assert not any("not measured" in report for report in reports)


def test_a_server_without_any_data_measures_no_accuracy_and_says_so(plan: Plan, tmp_path: Path) -> None:
    clients_data = _usps(tmp_path / "client", "train")
    without, reports = _serve(plan, tmp_path / "without", tmp_path / "nothing", clients_data)
    assert "test_accuracy" not in without
    assert any(report.startswith("accuracy is not measured: no USPS in") for report in reports)
    repeated = repeat(tmp_path / "without" / "run", tmp_path / "repeated", data=clients_data)
    assert repeated["weights_sha256"] == without["weights_sha256"]


def test_a_server_without_data_can_be_started_again(plan: Plan, tmp_path: Path) -> None:
    data = _usps(tmp_path / "client", "train")
    keys, folder, nothing = new_keys(tmp_path, CLIENTS), tmp_path / "run", tmp_path / "nothing"
    with pytest.raises(InterruptedError):
        serve(plan, folder, _clients(keys, tmp_path, data, stop_at=9), keys[0].roster, data=nothing)
    summary = serve(plan, folder, _clients(keys, tmp_path, data), keys[0].roster, data=nothing)
    assert summary["rounds"] == 3
    assert verify(folder).weights_sha256 == summary["weights_sha256"]
