"""Whole runs: what they leave in their folders, how they are stopped and resumed, and what they refuse."""

import json
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baffle.core.seeds import OF_THE_TRAJECTORY, Purpose, Seeds
from baffle.errors import BaffleError, JournalError, PlanError
from baffle.journal.audit import verify
from baffle.journal.replay import catch_up, lineage_of
from baffle.journal.store import Journal
from baffle.plan import Plan, load
from baffle.server.recorder import Progress, Recorder
from baffle.server.round import Played
from baffle.simulation import add_baseline, resume, simulate
from tests.support.watched_runs import interrupt_after, records_of

MakePlan = Callable[..., Plan]


def test_operators_use_one_thread_during_a_run(tiny: MakePlan, tmp_path: Path) -> None:
    seen: set[int] = set()
    torch.set_num_threads(2)
    simulate(tiny(), tmp_path / "run", watch=lambda _: seen.add(torch.get_num_threads()))
    assert seen == {1}
    assert torch.get_num_threads() == 2


def test_another_seed_leads_to_other_weights(tiny: MakePlan, tmp_path: Path) -> None:
    runs = {seed: simulate(tiny("rounds=1", f"seed={seed}"), tmp_path / str(seed)) for seed in (0, 1, 2**63 - 1)}
    assert len({summary["weights_sha256"] for summary in runs.values()}) == 3


@pytest.mark.parametrize("distribution", ["gaussian", "outer"])
def test_a_run_learns(tiny: MakePlan, tmp_path: Path, distribution: str) -> None:
    settings = ["rounds=8", "probe.k=40", "federation.batch=100", "update.rate=0.05"]
    summary = simulate(tiny(*settings, f"probe.distribution={distribution}"), tmp_path / "run")
    assert summary["test_accuracy"] > 0.3
    assert summary["train_loss"] < 2.2


def test_a_watcher_and_the_folder_hear_of_every_round(tiny: MakePlan, tmp_path: Path) -> None:
    calls: list[Progress] = []
    summary = simulate(tiny("rounds=7", "run.evaluate_every=3"), tmp_path / "run", watch=calls.append)
    files = {path.name for path in (tmp_path / "run").iterdir()}
    assert files == {"journal.sqlite", "metrics.jsonl", "plan.toml", "summary.json"}
    records = records_of(tmp_path / "run")
    done = [progress for progress in calls if progress.rounds_done == int(progress.rounds_done)]
    assert [progress.rounds_done for progress in done] == [1, 2, 3, 4, 5, 6, 7]
    assert {progress.rounds for progress in calls} == {7}
    assert (done[-1].value, done[-1].seconds_left) == (summary["test_accuracy"], 0)
    assert done[-1].uplink_bytes == sum(record["uplink_bytes"] for record in records)
    assert [record["round"] for record in records] == list(range(7))
    assert [record["round"] for record in records if "test_accuracy" in record] == [2, 5, 6]
    assert [record["contributors"] for record in records] == [3] * 7
    assert summary["forwards"] == 7 * 3 * 5
    assert records[-1]["test_accuracy"] == summary["test_accuracy"]
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary
    assert np.all(np.diff([record["seconds"] for record in records]) >= 0)


def test_resuming_a_finished_run_changes_nothing_but_how_long_it_is(finished_run: Path) -> None:
    before = json.loads((finished_run / "summary.json").read_text())
    after = resume(finished_run)
    for name in ("weights_sha256", "test_accuracy", "rounds", "forwards", "uplink_bytes_per_client_round"):
        assert after[name] == before[name]
    assert after["plan_digest"] == before["plan_digest"]
    longer = resume(finished_run, ["rounds=7"])
    with Journal.open(finished_run / "journal.sqlite") as journal:
        assert journal.plan() == load(str(finished_run / "plan.toml"))
        assert journal.plan().rounds == longer["rounds"] == 7


def test_a_longer_run_that_was_stopped_verifies_despite_the_summary_of_the_shorter_one(finished_run: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        resume(finished_run, ["rounds=20"], watch=interrupt_after(8))
    assert verify(finished_run).rounds == 8


def test_what_determines_the_weights_cannot_be_changed_midway(finished_run: Path) -> None:
    before = (finished_run / "plan.toml").read_text()
    for setting in ("probe.k=5", "seed=1", "update.rate=0.5", "federation.dropout=0.1", "ring.d_max=9"):
        with pytest.raises(PlanError, match=r"rounds, run\.\* and secure\.\*.*--out"):
            resume(finished_run, [setting])
    assert (finished_run / "plan.toml").read_text() == before
    verify(finished_run)


@pytest.mark.parametrize(("at", "mode"), [(1, "off"), (4, "on")])
def test_a_run_stopped_by_ctrl_c_keeps_its_rounds(tiny: MakePlan, tmp_path: Path, at: int, mode: str) -> None:
    plan = tiny(f"secure.mode={mode}")
    with pytest.raises(KeyboardInterrupt):
        simulate(plan, tmp_path / "run", watch=interrupt_after(at))
    assert verify(tmp_path / "run").rounds == at
    expected = simulate(plan, tmp_path / "whole")
    resumed = resume(tmp_path / "run")
    assert (resumed["weights_sha256"], resumed["skipped_rounds"]) == (expected["weights_sha256"], 0)
    assert verify(tmp_path / "run").chain == verify(tmp_path / "whole").chain


@pytest.mark.parametrize("at", [2, 5])
def test_a_run_killed_during_an_evaluation_evaluates_again(
    tiny: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    plan = tiny("rounds=5", "run.evaluate_every=2", "federation.batch=9")
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


def changed(query: str) -> Callable[[Path], object]:
    """A change to the journal in a run's folder."""

    def change(run: Path) -> None:
        db = sqlite3.connect(run / "journal.sqlite")
        db.execute(query)
        db.commit()
        db.close()

    return change


def unresolved(run: Path) -> None:
    plan = run / "plan.toml"
    plan.write_text(plan.read_text().replace("n_max = 480", "n_max = 0"))


SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "another version": (changed("UPDATE run SET format = 'baffle-journal/0'"), "another version"),
    "no journal": (lambda run: (run / "journal.sqlite").write_bytes(b"no journal" * 999), r"journal\.sqlite"),
    "metrics cut off": (changed("UPDATE metrics SET record = '{' WHERE round = 3"), "metrics"),
    "other metrics": (changed("""UPDATE metrics SET record = '{"round": 3}' WHERE round = 3"""), "metrics"),
    "no text": (lambda run: (run / "plan.toml").write_bytes(b"\xff"), r"plan\.toml"),
    "no TOML": (lambda run: (run / "plan.toml").write_bytes(b"rounds = = 1"), r"plan\.toml"),
    "unresolved": (unresolved, "not a resolved plan"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_folder_with_a_spoilt_file_is_refused(finished_run: Path, name: str) -> None:
    spoil, why = SPOILT[name]
    spoil(finished_run)
    with pytest.raises(BaffleError, match=why):
        resume(finished_run, ["rounds=8"])


def test_a_round_whose_metrics_were_lost_is_still_counted(tiny: MakePlan, tmp_path: Path) -> None:
    """A process killed between the two writes leaves a durable round without metrics."""
    simulate(tiny("rounds=4"), tmp_path / "run")
    changed("DELETE FROM metrics WHERE round = 3")(tmp_path / "run")
    changed("DELETE FROM participation WHERE round = 3")(tmp_path / "run")
    assert resume(tmp_path / "run", ["rounds=6"])["rounds"] == 6
    verify(tmp_path / "run")


def test_a_journal_of_another_plan_is_refused(tiny: MakePlan, finished_run: Path, tmp_path: Path) -> None:
    simulate(tiny("seed=1"), tmp_path / "other")
    shutil.copy(tmp_path / "other" / "journal.sqlite", finished_run / "journal.sqlite")
    with pytest.raises(JournalError, match="belongs to another plan"):
        resume(finished_run)
    with pytest.raises(JournalError, match="describes another run"):
        verify(finished_run)


def test_a_run_killed_before_its_journal_begins_where_it_would_have(finished_run: Path) -> None:
    expected = json.loads((finished_run / "summary.json").read_text())["weights_sha256"]
    for name in ("journal.sqlite", "metrics.jsonl", "summary.json"):
        (finished_run / name).unlink()
    assert resume(finished_run)["weights_sha256"] == expected
    (finished_run / "journal.sqlite").write_bytes(b"")
    assert resume(finished_run)["weights_sha256"] == expected


def test_no_folder_is_made_when_a_plan_is_refused(tiny: MakePlan, tmp_path: Path) -> None:
    for settings in (["federation.clients=2000"], ["probe.sigma=1e-18"], ["ring.d_max=1e12"]):
        with pytest.raises(PlanError):
            simulate(tiny(*settings), tmp_path / "run")
        assert not (tmp_path / "run").exists()


DEEP = ['task.model={name="lenet", channels=[2, 3]}', "update.rate=1e30"]


@pytest.mark.parametrize(
    "settings",
    [
        [*DEEP, "secure.mode=on"],
        [*DEEP, "probe.scheme=central"],
        [*DEEP, 'federation.level="epoch"', "federation.batch=400", 'estimator="backprop"'],
        ['update.optimizer="sgd"', "update.rate=1e4", "update.weight_decay=1"],
    ],
    ids=["secure", "central", "backprop epoch", "weights beyond float32"],
)
def test_a_run_that_diverges_stops_after_ten_rounds_and_says_why(
    tiny: MakePlan, tmp_path: Path, settings: list[str]
) -> None:
    with pytest.raises(
        BaffleError, match=r"10 rounds in a row.*loss was finite.*diverge.*smaller update\.rate.*kept in"
    ) as stopped:
        simulate(tiny(*settings, "rounds=60"), tmp_path / "run")
    assert str(tmp_path / "run") in str(stopped.value)
    assert verify(tmp_path / "run").skipped == 10
    with pytest.raises(BaffleError, match="10 rounds in a row"):
        resume(tmp_path / "run")


def test_a_loss_that_is_never_finite_is_refused(
    tiny: MakePlan, tmp_path: Path, spoilt: Callable[[object], str]
) -> None:
    with pytest.raises(BaffleError, match=r"No loss was finite even at the initial weights: look for NaN"):
        simulate(tiny(spoilt(":"), "rounds=40"), tmp_path / "run")


@pytest.mark.parametrize("settings", [[], ["probe.head=exact"], ["federation.level=epoch", "federation.steps=2"]])
def test_a_long_first_round_tells_from_its_start_how_far_it_is(
    tiny: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: list[str]
) -> None:
    monkeypatch.setattr("baffle.server.recorder.SOON", 0.0)  # report as if each pass took a second
    seen = list[Progress]()
    plan = tiny('task.model={name="lenet", channels=[2, 2]}', *settings, "rounds=2")
    summary = simulate(plan, tmp_path / "run", watch=seen.append)
    places = [now.rounds_done for now in seen]
    assert places == sorted(places)
    assert 0 < places[0] < 0.2
    assert len({place for place in places if place < 1}) > 12
    assert all(now.seconds_left is not None for now in seen)
    monkeypatch.setattr("baffle.server.recorder.SOON", 1e9)
    assert simulate(plan, tmp_path / "b")["weights_sha256"] == summary["weights_sha256"]


def test_a_run_that_is_shorter_than_ten_rounds_does_not_end_well_either(
    tiny: MakePlan, tmp_path: Path, spoilt: Callable[[object], str]
) -> None:
    for name, settings, words in (
        ("a", [spoilt(":"), "rounds=3"], r"^The last 3 rounds were skipped; .* No loss was finite even at the initial"),
        ("b", [spoilt(":"), "rounds=1"], r"^The last round was skipped; the first reason"),
        ("c", [*DEEP, "rounds=4"], r"^The last \d rounds were skipped; .*smaller update\.rate.*kept in"),
        (
            "d",
            ["update.optimizer=sgd", "update.rate=3e38", "update.weight_decay=3e38", "rounds=1"],
            "^the last weights",
        ),
    ):
        with pytest.raises(BaffleError, match=words):
            simulate(tiny(*settings), tmp_path / name)
        assert json.loads((tmp_path / name / "summary.json").read_text())["rounds"] < 5


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
    resume(finished_run, ["rounds=9"])
    assert add_baseline(finished_run)["baseline_rounds"] == 9  # as long as the run


def test_with_one_client_own_seeds_differ_from_shared_ones_only_in_the_key(
    tiny: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Seeds.key

    def key(seeds: Seeds, purpose: Purpose, *numbers: int) -> bytes:
        if purpose in OF_THE_TRAJECTORY:
            return real(Seeds(0, b""), "local", numbers[0])
        return real(seeds, purpose, *numbers)

    settings = ["federation.clients=1", 'update.optimizer="sgd"', "update.rate=0.1", "probe.distribution=sphere"]

    def weights(seeds: str) -> Any:
        simulate(tiny(*settings, "rounds=2", f"federation.seeds={seeds}"), tmp_path / seeds)
        with Journal.open(tmp_path / seeds / "journal.sqlite") as journal:
            return catch_up(journal, lineage_of(journal, journal.plan())).state.weights

    assert np.abs(weights("shared") - weights("own")).max() > 1e-3
    assert add_baseline(tmp_path / "own")["baseline_rounds"] == 2
    for name in ("shared", "own"):
        shutil.rmtree(tmp_path / name)
    monkeypatch.setattr(Seeds, "key", key)
    np.testing.assert_allclose(weights("shared"), weights("own"), atol=1e-5)


@pytest.mark.parametrize("runtime", ["onnx", "torch"])
def test_a_runs_own_plan_names_its_runtime(tiny: MakePlan, tmp_path: Path, runtime: str) -> None:
    """Otherwise a run that is resumed where another runtime is installed would go on with other last bits."""
    settings = ['task.init = "numpy"', *([f"run.runtime={runtime}"] if runtime == "torch" else [])]
    simulate(tiny(*settings, "rounds=2"), tmp_path / "run")
    resume(tmp_path / "run", ["rounds=4"])
    assert load(str(tmp_path / "run" / "plan.toml")).run.runtime == runtime
    with sqlite3.connect(tmp_path / "run" / "journal.sqlite") as database:
        (versions,) = database.execute("SELECT versions FROM run").fetchone()
    assert ("onnxruntime" in json.loads(versions)) == (runtime == "onnx")
