"""A networked run is repeated in one process: under its statements, with its dropouts, to the same weights."""

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from baffle.core.messages import first_number, tag_of
from baffle.errors import ChainError, JournalError, PlanError, RunFolderError
from baffle.journal.audit import verify
from baffle.journal.store import Journal
from baffle.network.member.equipment import Equipment, with_plan
from baffle.network.member.member import Member
from baffle.network.member.policy import Policy
from baffle.plan import Plan, change
from baffle.plan.sections import LARGEST
from baffle.simulation import repeat, resume
from tests.support.lines_in_memory import Federation, LinesInMemory, new_keys


@pytest.fixture
def federation(tiny: Callable[..., Plan], tmp_path: Path) -> Federation:
    settings = ("federation.clients=6", 'secure.mode="on"', "secure.floor=2", "rounds=3")
    policy = Policy(mode="off", floor=2, scalars_only=False, without_privacy=True)
    return Federation(new_keys(tmp_path, 6), tmp_path, tiny(*settings), policy=policy)


def require_repeated(federation: Federation) -> None:
    original, out = verify(federation.run), federation.folder / "repeated"
    summary = repeat(federation.run, out)
    again = verify(out)
    assert (again.weights_sha256, again.chain) == (original.weights_sha256, original.chain)
    assert (summary["weights_sha256"], summary["rounds"]) == (original.weights_sha256, original.rounds)
    with Journal.open(federation.run / "journal.sqlite") as one, Journal.open(out / "journal.sqlite") as other:
        assert one.statements.epochs_with_rosters() == other.statements.epochs_with_rosters()
        assert [entry.outcome_bytes for entry in one.entries()] == [entry.outcome_bytes for entry in other.entries()]
        for number in range(original.rounds):
            assert one.participation.contributors(number) == other.participation.contributors(number)


@pytest.mark.parametrize(
    "settings",
    [
        ("federation.participation=0.67", "ring.n_max=7"),
        ("secure.groups=2", 'secure.group_seeds="own"', "federation.tiers=[{k=2, share=0.34}]"),
        ("probe.distribution=outer", "probe.k=12", "run.runtime=torch"),
        ("probe.head=exact", "federation.tiers=[{k=2, share=0.34}]"),
        ("probe.head=exact", "secure.groups=2", 'secure.group_seeds="own"', "secure.combine=median"),
        ("probe.head=exact", "federation.local_steps=3", "federation.warm_up=1", "federation.batch=8"),
        ('federation.weighting="uniform"', 'federation.level="epoch"', "federation.steps=1"),
        ('secure.mode="malicious-server"', 'federation.weighting="uniform"'),
        ('secure.mode="off"',),
    ],
)
def test_a_run_is_repeated_to_the_last_bit(federation: Federation, settings: tuple[str, ...]) -> None:
    federation.plan = change(federation.plan, list(settings))
    pinned = federation.plan if 'secure.mode="off"' in settings else None
    lines = LinesInMemory({number: federation.member(number, pinned=pinned).answer for number in range(6)})
    federation.serve(lines)
    with Journal.open(federation.run / "journal.sqlite") as journal:
        assert journal.plan().probe.together == (12 if "probe.k=12" in settings else 0)
    require_repeated(federation)


def silent_in_round(number: int, answer: Callable[[bytes], bytes | None]) -> Callable[[bytes], bytes | None]:
    return lambda data: None if tag_of(data) == "masked-request" and first_number(data) == number else answer(data)


def test_with_its_dropouts_epochs_and_skipped_rounds(federation: Federation) -> None:
    """One client is silent in round 2, two are in round 4, which leaves too few for a sum."""
    federation.plan = change(federation.plan, ["secure.floor=4", "rounds=12"])
    lines = federation.lines(5)
    for client, number in ((1, 2), (1, 4), (2, 4)):
        lines.clients[client] = silent_in_round(number, lines.clients[client])

    def come_and_go(exchange: int) -> None:
        if exchange == 16:
            del lines.clients[0]
        if exchange == 22:
            lines.clients[5] = federation.member(5).answer

    lines.before = come_and_go
    summary = federation.serve(lines, least=5)
    assert summary["dropouts"] > 0
    assert summary["skipped_rounds"] > 0
    with Journal.open(federation.run / "journal.sqlite") as journal:
        assert len(journal.statements.epochs()) == 2
        assert len({frozenset(journal.participation.contributors(number)) for number in range(12)}) > 2
    require_repeated(federation)


def test_a_client_with_other_samples_than_the_plans_partition_is_noticed(federation: Federation) -> None:
    keys = federation.keys[2]
    ordinary = with_plan(2, None, part=True)

    def fewer(plan: Plan, _most_weights: int = LARGEST) -> Equipment:
        worker, initial = ordinary(plan)
        return Equipment(replace(worker, indices=np.asarray(worker.indices)[::2]), initial)

    lines = federation.lines(6)
    member = Member(keys, federation.folder / "client-2", fewer, policy=federation.policy)
    lines.clients[2] = member.answer
    federation.serve(lines)
    with pytest.raises(ChainError) as refused:
        repeat(federation.run, federation.folder / "repeated")
    assert str(refused.value) == (
        "round 0 does not come out as in the original: the clients had other samples than the plan's partition gives "
        "them, another runtime (try --set run.runtime=torch or onnx), or other versions of the libraries"
    )
    assert refused.value.round_number == 0


def test_clients_on_another_runtime_are_repeated_on_it(federation: Federation) -> None:
    federation.plan = change(
        federation.plan, ['task.init = "numpy"', 'task.model = {name = "lenet", channels = [2, 3]}']
    )
    lines = federation.lines(6)
    for number in range(6):
        state = federation.folder / f"client-{number}"
        equip = with_plan(number, None, part=True, runtime="torch")
        lines.clients[number] = Member(federation.keys[number], state, equip, policy=federation.policy).answer
    federation.serve(lines)
    with pytest.raises(ChainError, match="another runtime"):
        repeat(federation.run, federation.folder / "on another", ["run.runtime=onnx"])
    repeat(federation.run, federation.folder / "on theirs", ["run.runtime=torch"])
    assert verify(federation.folder / "on theirs").chain == verify(federation.run).chain
    with pytest.raises(PlanError, match=r"may change run\.\* and nothing else"):
        repeat(federation.run, federation.folder / "longer", ["rounds=9"])


def test_on_the_command_line_and_into_an_empty_folder_only(
    federation: Federation, cli: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """Clients have agreed to the run's rounds. Neither it nor its repetition may get more without them."""
    federation.serve(federation.lines(6))
    done = cli("run", "--as", federation.run, "--out", tmp_path / "again", "--quiet")
    assert (done.returncode, done.stderr) == (0, "")
    assert verify(tmp_path / "again").chain == verify(federation.run).chain
    for more in (["digits"], ["--resume", str(federation.run)], ["--baseline"]):
        refused = cli("run", "--as", federation.run, *more)
        assert refused.returncode == 2
        assert "repeats that run as it was" in refused.stderr
    assert cli("run", "--as", federation.run, "--out", federation.run).returncode == 2
    assert "holds no run" in cli("run", "--as", tmp_path / "nowhere", "--out", tmp_path / "other").stderr
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("")
    with pytest.raises(RunFolderError, match="is not empty"):
        repeat(federation.run, tmp_path / "taken")
    for folder in (federation.run, tmp_path / "again"):
        before = {file: file.read_bytes() for file in folder.iterdir()}
        with pytest.raises(JournalError, match="holds a networked run; continue it with `baffle serve`"):
            resume(folder, ["rounds=9"])
        assert {file: file.read_bytes() for file in folder.iterdir()} == before


def test_a_simulation_is_repeated_by_its_plan(finished_run: Path, tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="holds no networked run with statements; a simulation is repeated by its"):
        repeat(finished_run, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_a_run_that_is_not_over_is_repeated_as_far_as_it_goes(federation: Federation) -> None:
    lines = federation.lines(6)

    def stop(exchange: int) -> None:
        if exchange == 10:
            raise InterruptedError

    lines.before = stop
    with pytest.raises(InterruptedError):
        federation.serve(lines)
    played = verify(federation.run).rounds
    assert 0 < played < 3
    require_repeated(federation)
