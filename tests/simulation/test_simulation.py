"""Whole runs: every variant gives the same bits again, with any number of workers, stopped and resumed or not."""

import json
import shutil
import sqlite3
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baffle.core.seeds import OF_THE_TRAJECTORY, Purpose, Seeds
from baffle.data.partition import iid
from baffle.errors import BaffleError, JournalError, PlanError, RunFolderError
from baffle.journal.audit import verify
from baffle.journal.replay import catch_up, lineage_of
from baffle.journal.store import Journal
from baffle.plan import Plan, load
from baffle.server.recorder import Progress, Recorder, Summary
from baffle.server.round import Played
from baffle.simulation import add_baseline, resume, simulate
from tests.support.watched_runs import interrupt_after, records_of

FIXED = "probe.micro_batch=64"  # otherwise it is measured, and two runs may disagree
VARIANTS: dict[str, list[str]] = {
    "forward": [],
    "central": ["probe.scheme=central"],
    "gaussian": ["probe.distribution=gaussian"],
    "momentum": ['update.optimizer="momentum"'],
    "sgd": ['update.optimizer="sgd"', "update.rate=0.1"],
    "clip and decay": ["update.clip=0.3", "update.weight_decay=0.01"],
    "no average": ["update.ema=0"],
    "uniform": ["federation.weighting=uniform"],
    "own seeds": ["federation.seeds=own"],
    "tiers": ["federation.tiers=[{k=2, share=0.34}, {k=1, share=0.33}]"],
    "few": ["federation.clients=10", "federation.participation=0.3"],
    "one client": ["federation.clients=1"],
    "full batch": ["federation.batch=0", FIXED],
    "epoch": ['federation.level="epoch"', "rounds=3", "federation.batch=100", FIXED],
    "epoch central": ['federation.level="epoch"', "probe.scheme=central", "rounds=2", "federation.batch=100", FIXED],
    "epoch in one step": ['federation.level="epoch"', "federation.batch=0", FIXED, "federation.epochs=2"],
    "epoch of steps": ['federation.level="epoch"', "rounds=2", "federation.steps=3"],
    "backprop": ['estimator="backprop"'],
    "backprop epoch": ['estimator="backprop"', 'federation.level="epoch"', "rounds=3"],
    "backprop in one step": ['estimator="backprop"', 'federation.level="epoch"', "federation.batch=0", FIXED],
    "lenet": ['task.model={name="lenet", channels=[2, 3], norm="group", activation="relu"}'],
    "batch norm": ['task.model={name="lenet", channels=[2, 3], norm="batch"}'],
}


Ran = Callable[[str], tuple[Path, Summary]]


@pytest.fixture(scope="module")
def ran(tiny: Callable[..., Plan], tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """The run of a variant, simulated when a test first asks for it."""
    folder = tmp_path_factory.mktemp("variants")

    @cache
    def run(name: str) -> tuple[Path, Summary]:
        return folder / name, simulate(tiny(*VARIANTS[name]), folder / name)

    return run


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_runs_twice_to_the_same_weights_and_verifies(
    tiny: Callable[..., Plan], tmp_path: Path, ran: Ran, name: str
) -> None:
    path, summary = ran(name)
    plan = tiny(*VARIANTS[name])
    assert simulate(plan, tmp_path / "again")["weights_sha256"] == summary["weights_sha256"]
    assert summary["rounds"] == plan.rounds
    assert summary["skipped_rounds"] == 0
    verified = verify(path)
    assert (verified.weights_sha256, verified.rounds) == (summary["weights_sha256"], plan.rounds)


def test_every_variant_leads_to_other_weights(ran: Ran) -> None:
    assert len({ran(name)[1]["weights_sha256"] for name in VARIANTS}) == len(VARIANTS)


@pytest.mark.parametrize("name", ["forward", "own seeds", "epoch", "backprop", "lenet"])
def test_the_number_of_workers_changes_no_bit(tiny: Callable[..., Plan], tmp_path: Path, name: str) -> None:
    settings = [*VARIANTS[name], "federation.clients=5", "rounds=3"]
    hashes = {
        simulate(tiny(*settings, f"run.workers={workers}"), tmp_path / str(workers))["weights_sha256"]
        for workers in (0, 1, 2, 3)
    }
    assert len(hashes) == 1


def test_operators_use_one_thread_during_a_run(tiny: Callable[..., Plan], tmp_path: Path) -> None:
    seen: set[int] = set()
    torch.set_num_threads(2)
    simulate(tiny(), tmp_path / "run", watch=lambda _: seen.add(torch.get_num_threads()))
    assert seen == {1}
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("participation", [1.0, 0.3])
def test_the_downlink_changes_no_bit(tiny: Callable[..., Plan], tmp_path: Path, participation: float) -> None:
    common = ["federation.clients=10", "rounds=15", f"federation.participation={participation}"]
    summaries = {
        kind: simulate(tiny(*common, f"run.downlink={kind}"), tmp_path / kind)
        for kind in ("scalars", "delta", "weights")
    }
    assert len({summary["weights_sha256"] for summary in summaries.values()}) == 1
    assert len({summary["trajectory_digest"] for summary in summaries.values()}) == 1
    scalars, weights = (summaries[kind]["downlink_bytes_per_client_round"] for kind in ("scalars", "weights"))
    assert scalars < weights


def test_another_seed_leads_to_other_weights(tiny: Callable[..., Plan], tmp_path: Path) -> None:
    hashes = {simulate(tiny(f"seed={seed}"), tmp_path / str(seed))["weights_sha256"] for seed in (0, 1, 2**63 - 1)}
    assert len(hashes) == 3


def test_a_run_learns(tiny: Callable[..., Plan], tmp_path: Path) -> None:
    summary = simulate(tiny("rounds=150", "probe.k=16", "update.rate=0.02"), tmp_path / "run")
    assert summary["test_accuracy"] > 0.7
    assert summary["train_loss"] < 1


def test_the_folder_has_a_record_of_every_round(tiny: Callable[..., Plan], tmp_path: Path) -> None:
    summary = simulate(tiny("rounds=7", "run.evaluate_every=3"), tmp_path / "run")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "journal.sqlite",
        "metrics.jsonl",
        "plan.toml",
        "summary.json",
    ]
    records = records_of(tmp_path / "run")
    assert [record["round"] for record in records] == list(range(7))
    assert [record["round"] for record in records if "test_accuracy" in record] == [2, 5, 6]
    assert [record["contributors"] for record in records] == [3] * 7
    assert summary["forwards"] == 7 * 3 * 5
    assert records[-1]["test_accuracy"] == summary["test_accuracy"]
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary
    assert np.all(np.diff([record["seconds"] for record in records]) >= 0)


def test_a_watcher_is_called_for_every_round(tiny: Callable[..., Plan], tmp_path: Path) -> None:
    calls: list[Progress] = []
    summary = simulate(tiny(), tmp_path / "run", watch=calls.append)
    done = [progress for progress in calls if progress.rounds_done == int(progress.rounds_done)]
    assert [progress.rounds_done for progress in done] == [1, 2, 3, 4, 5, 6]
    assert {progress.rounds for progress in calls} == {6}
    assert done[-1].value == summary["test_accuracy"]
    assert done[-1].seconds_left == 0
    assert done[-1].uplink_bytes == sum(record["uplink_bytes"] for record in records_of(tmp_path / "run"))


@pytest.mark.parametrize("name", ["forward", "few", "epoch", "backprop", "tiers", "no average"])
def test_a_longer_run_is_a_shorter_one_continued(tiny: Callable[..., Plan], tmp_path: Path, name: str) -> None:
    settings = [setting for setting in VARIANTS[name] if not setting.startswith("rounds")]
    expected = simulate(tiny(*settings, "rounds=7"), tmp_path / "whole")
    simulate(tiny(*settings, "rounds=3"), tmp_path / "parts")
    resume(tmp_path / "parts", ["rounds=4"])
    continued = resume(tmp_path / "parts", ["rounds=7", "run.downlink=delta", "run.workers=1"])
    assert continued["weights_sha256"] == expected["weights_sha256"]
    assert continued["rounds"] == 7
    assert continued["forwards"] == expected["forwards"]
    assert [record["round"] for record in records_of(tmp_path / "parts")] == list(range(7))
    assert verify(tmp_path / "parts").chain == verify(tmp_path / "whole").chain
    with Journal.open(tmp_path / "parts" / "journal.sqlite") as journal:
        assert journal.plan() == load(str(tmp_path / "parts" / "plan.toml"))
        assert journal.plan().rounds == 7


def test_resuming_a_finished_run_changes_nothing(finished_run: Path) -> None:
    before = json.loads((finished_run / "summary.json").read_text())
    after = resume(finished_run)
    for name in (
        "weights_sha256",
        "test_accuracy",
        "rounds",
        "forwards",
        "uplink_bytes_per_client_round",
        "plan_digest",
    ):
        assert after[name] == before[name]


def test_a_longer_run_that_was_stopped_verifies_despite_the_summary_of_the_shorter_one(
    finished_run: Path,
) -> None:
    with pytest.raises(KeyboardInterrupt):
        resume(finished_run, ["rounds=20"], watch=interrupt_after(8))
    assert verify(finished_run).rounds == 8


@pytest.mark.parametrize("setting", ["probe.k=5", "seed=1", "update.rate=0.5", "federation.clients=4", "ring.d_max=9"])
def test_what_determines_the_weights_cannot_be_changed_midway(finished_run: Path, setting: str) -> None:
    before = (finished_run / "plan.toml").read_text()
    with pytest.raises(PlanError, match=r"rounds, run\.\* and secure\.\*.*--out"):
        resume(finished_run, [setting])
    assert (finished_run / "plan.toml").read_text() == before
    verify(finished_run)


@pytest.mark.parametrize("at", [1, 4, 5])
def test_a_run_stopped_by_ctrl_c_keeps_its_rounds(tiny: Callable[..., Plan], tmp_path: Path, at: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        simulate(tiny(), tmp_path / "run", watch=interrupt_after(at))
    assert verify(tmp_path / "run").rounds == at
    expected = simulate(tiny(), tmp_path / "whole")
    assert resume(tmp_path / "run")["weights_sha256"] == expected["weights_sha256"]


@pytest.mark.parametrize("at", [1, 2, 4, 5])
def test_a_run_killed_during_an_evaluation_evaluates_again(
    tiny: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    plan = tiny("rounds=5", "run.evaluate_every=2")
    expected = simulate(plan, tmp_path / "whole")
    record = Recorder.record

    def stop(self: Recorder, played: Played) -> None:
        if played.present.round == at:
            raise KeyboardInterrupt
        record(self, played)

    with monkeypatch.context() as killed:
        killed.setattr(Recorder, "record", stop)
        with pytest.raises(KeyboardInterrupt):
            simulate(plan, tmp_path / "run")
    assert resume(tmp_path / "run")["weights_sha256"] == expected["weights_sha256"]
    whole, resumed = (
        [record.get("test_accuracy") for record in records_of(tmp_path / run)] for run in ("whole", "run")
    )
    assert whole == resumed
    assert [accuracy is not None for accuracy in whole] == [False, True, False, True, True]


def test_a_round_whose_metrics_were_lost_is_still_counted(tiny: Callable[..., Plan], tmp_path: Path) -> None:
    """A process killed between the two writes leaves a durable round without metrics."""
    simulate(tiny("rounds=4"), tmp_path / "run")
    db = sqlite3.connect(tmp_path / "run" / "journal.sqlite")
    db.execute("DELETE FROM metrics WHERE round = 3")
    db.execute("DELETE FROM participation WHERE round = 3")
    db.commit()
    db.close()
    assert resume(tmp_path / "run", ["rounds=6"])["rounds"] == 6
    verify(tmp_path / "run")


def test_an_output_folder_in_use_is_refused_at_once(finished_run: Path, tiny: Callable[..., Plan]) -> None:
    with pytest.raises(RunFolderError, match="holds another run"):
        simulate(tiny(), finished_run)
    verify(finished_run)


def test_a_run_in_progress_cannot_be_resumed(tiny: Callable[..., Plan], tmp_path: Path) -> None:
    refusals: list[str] = []

    def intrude(progress: Progress) -> None:
        if progress.rounds_done == 2:
            thread = threading.Thread(target=attempt)
            thread.start()
            thread.join()

    def attempt() -> None:
        try:
            resume(tmp_path / "run")
        except RunFolderError as fault:
            refusals.append(str(fault))

    simulate(tiny(), tmp_path / "run", watch=intrude)
    assert len(refusals) == 1
    assert "in use by another process" in refusals[0]
    verify(tmp_path / "run")


def test_a_journal_of_another_plan_is_refused(tiny: Callable[..., Plan], finished_run: Path, tmp_path: Path) -> None:
    simulate(tiny("seed=1"), tmp_path / "other")
    shutil.copy(tmp_path / "other" / "journal.sqlite", finished_run / "journal.sqlite")
    with pytest.raises(JournalError, match="belongs to another plan"):
        resume(finished_run)
    with pytest.raises(JournalError, match="describes another run"):
        verify(finished_run)


def test_a_journal_of_another_version_is_refused(finished_run: Path) -> None:
    db = sqlite3.connect(finished_run / "journal.sqlite")
    db.execute("UPDATE run SET format = 'baffle-journal/0'")
    db.commit()
    db.close()
    with pytest.raises(JournalError, match="another version"):
        resume(finished_run)


def test_a_file_that_is_no_journal_is_refused(finished_run: Path) -> None:
    (finished_run / "journal.sqlite").write_bytes(b"no journal" * 999)
    with pytest.raises(BaffleError, match=r"journal\.sqlite"):
        resume(finished_run)


@pytest.mark.parametrize("record", ["{", "[]", '{"round": 3}'])
def test_metrics_that_cannot_be_read_are_refused(finished_run: Path, record: str) -> None:
    db = sqlite3.connect(finished_run / "journal.sqlite")
    db.execute("UPDATE metrics SET record = ? WHERE round = 3", (record,))
    db.commit()
    db.close()
    with pytest.raises(JournalError):
        resume(finished_run, ["rounds=8"])


@pytest.mark.parametrize("content", [b"\xff", b"rounds = = 1"])
def test_a_plan_that_cannot_be_read_is_refused(finished_run: Path, content: bytes) -> None:
    (finished_run / "plan.toml").write_bytes(content)
    with pytest.raises(BaffleError, match=r"plan\.toml"):
        resume(finished_run)


def test_a_plan_that_was_never_resolved_is_refused(finished_run: Path) -> None:
    plan = finished_run / "plan.toml"
    plan.write_text(plan.read_text().replace("n_max = 480", "n_max = 0"))
    with pytest.raises(JournalError, match="not a resolved plan"):
        resume(finished_run)


def test_a_run_killed_before_its_journal_begins_where_it_would_have(finished_run: Path) -> None:
    expected = json.loads((finished_run / "summary.json").read_text())["weights_sha256"]
    for name in ("journal.sqlite", "metrics.jsonl", "summary.json"):
        (finished_run / name).unlink()
    assert resume(finished_run)["weights_sha256"] == expected
    (finished_run / "journal.sqlite").write_bytes(b"")
    assert resume(finished_run)["weights_sha256"] == expected


def test_no_folder_is_made_when_a_plan_is_refused(tiny: Callable[..., Plan], tmp_path: Path) -> None:
    for settings in (["federation.clients=2000"], ["probe.sigma=1e-18"], ["ring.d_max=1e12"]):
        with pytest.raises(PlanError):
            simulate(tiny(*settings), tmp_path / "run")
        assert not (tmp_path / "run").exists()


DEEP = ['task.model={name="lenet", channels=[2, 3]}', "update.rate=1e30"]


@pytest.mark.parametrize(
    "settings",
    [
        DEEP,
        [*DEEP, "secure.mode=on"],
        [*DEEP, "probe.scheme=central"],
        [*DEEP, 'estimator="backprop"'],
        [*DEEP, 'federation.level="epoch"', "federation.batch=200"],
        [*DEEP, 'federation.level="epoch"', "federation.batch=200", 'estimator="backprop"'],
        ['update.optimizer="sgd"', "update.rate=1e4", "update.weight_decay=1"],
    ],
    ids=["batch", "secure", "central", "backprop", "epoch", "backprop epoch", "weights beyond float32"],
)
def test_a_run_that_diverges_stops_after_ten_rounds_and_says_why(
    tiny: Callable[..., Plan], tmp_path: Path, settings: list[str]
) -> None:
    with pytest.raises(
        BaffleError, match=r"10 rounds in a row.*loss was finite.*diverge.*smaller update\.rate.*kept in"
    ) as stopped:
        simulate(tiny(*settings, "rounds=60"), tmp_path / "run")
    assert str(tmp_path / "run") in str(stopped.value)
    assert verify(tmp_path / "run").skipped == 10
    with pytest.raises(BaffleError, match="10 rounds in a row"):
        resume(tmp_path / "run")


@pytest.mark.parametrize("client", [0, 1, 2])
def test_a_client_whose_loss_is_not_finite_contributes_nothing_and_the_others_continue(
    tiny: Callable[..., Plan], tmp_path: Path, spoilt: Callable[[object], str], client: int
) -> None:
    share = iid(Seeds(0, b"").key("partition"), 60, 3)[client]
    summary = simulate(tiny(spoilt(share[0]), "federation.batch=0", "rounds=12"), tmp_path / "run")
    assert summary["skipped_rounds"] == 0
    assert [record["contributors"] for record in records_of(tmp_path / "run")] == [3] * 12
    assert np.isfinite(summary["train_loss"])
    assert summary["forwards"] == 12 * 3 * 5
    assert summary["clipped"] == 12 * 4
    db = sqlite3.connect(tmp_path / "run" / "journal.sqlite")
    rows = db.execute("SELECT DISTINCT client, event FROM participation ORDER BY client").fetchall()
    db.close()
    assert rows == [(number, "contributed") for number in range(3)]
    verify(tmp_path / "run")


def test_a_loss_that_is_never_finite_is_refused(
    tiny: Callable[..., Plan], tmp_path: Path, spoilt: Callable[[object], str]
) -> None:
    with pytest.raises(BaffleError, match=r"No loss was finite even at the initial weights: look for NaN"):
        simulate(tiny(spoilt(":"), "rounds=40"), tmp_path / "run")


def test_a_baseline_is_trained_beside_the_run_from_the_same_start(finished_run: Path) -> None:
    before = json.loads((finished_run / "summary.json").read_text())
    summary = add_baseline(finished_run)
    assert summary.items() >= before.items()
    for name in ("test_accuracy", "rounds", "seconds", "uplink_bytes_per_client_round"):
        assert f"baseline_{name}" in summary
    assert summary["baseline_rounds"] == 6
    assert summary["baseline_uplink_bytes_per_client_round"] > 4 * 650
    assert json.loads((finished_run / "summary.json").read_text()) == summary
    assert verify(finished_run / "baseline").rounds == 6
    verify(finished_run)
    again = add_baseline(finished_run)
    assert again["baseline_test_accuracy"] == summary["baseline_test_accuracy"]


def test_the_baseline_of_a_longer_run_is_as_long(finished_run: Path) -> None:
    add_baseline(finished_run)
    resume(finished_run, ["rounds=9"])
    assert add_baseline(finished_run)["baseline_rounds"] == 9


def test_a_run_with_own_seeds_has_a_baseline_too(tiny: Callable[..., Plan], tmp_path: Path) -> None:
    simulate(tiny("federation.seeds=own"), tmp_path / "run")
    assert add_baseline(tmp_path / "run")["baseline_rounds"] == 6


def test_with_one_client_own_seeds_differ_from_shared_ones_only_in_the_key(
    tiny: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Seeds.key

    def key(seeds: Seeds, purpose: Purpose, *numbers: int) -> bytes:
        if purpose in OF_THE_TRAJECTORY:
            return real(Seeds(0, b""), "local", numbers[0])
        return real(seeds, purpose, *numbers)

    settings = ["federation.clients=1", 'update.optimizer="sgd"', "update.rate=0.1", "probe.distribution=sphere"]

    def weights(seeds: str) -> Any:
        simulate(tiny(*settings, f"federation.seeds={seeds}"), tmp_path / seeds)
        with Journal.open(tmp_path / seeds / "journal.sqlite") as journal:
            return catch_up(journal, lineage_of(journal, journal.plan())).state.weights

    assert np.abs(weights("shared") - weights("own")).max() > 1e-3
    for name in ("shared", "own"):
        shutil.rmtree(tmp_path / name)
    monkeypatch.setattr(Seeds, "key", key)
    np.testing.assert_allclose(weights("shared"), weights("own"), atol=1e-5)


def test_probes_in_half_precision_change_the_weights_and_the_chain_still_verifies(
    tiny: Callable[..., Plan], tmp_path: Path
) -> None:
    settings = ("task.model={name='lenet', channels=[2, 2], head='flatten'}", "probe.sigma=1e-2")
    plain = simulate(tiny(*settings), tmp_path / "plain")
    half = simulate(tiny(*settings, "probe.precision=bfloat16"), tmp_path / "half")
    assert verify(tmp_path / "half").weights_sha256 == half["weights_sha256"] != plain["weights_sha256"]


@pytest.mark.parametrize("runtime", ["onnx", "torch"])
def test_a_runs_own_plan_names_its_runtime(tiny: Callable[..., Plan], tmp_path: Path, runtime: str) -> None:
    """Otherwise a run that is resumed where another runtime is installed would go on with other last bits."""
    settings = ['task.init = "numpy"', *([f"run.runtime={runtime}"] if runtime == "torch" else [])]
    simulate(tiny(*settings, "rounds=2"), tmp_path / "run")
    resume(tmp_path / "run", ["rounds=4"])
    assert load(str(tmp_path / "run" / "plan.toml")).run.runtime == runtime
    with sqlite3.connect(tmp_path / "run" / "journal.sqlite") as database:
        (versions,) = database.execute("SELECT versions FROM run").fetchone()
    assert ("onnxruntime" in json.loads(versions)) == (runtime == "onnx")
