"""Runs of version 0.1 whose computation was mended since: they verify, but nobody goes on with them by mistake."""

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from baffle.errors import JournalError, ModelError
from baffle.export import export_run
from baffle.journal.audit import verify
from baffle.network.settling import differences
from baffle.plan import LeNet, MobileNet, Onnx, Plan, load
from baffle.simulation import resume, simulate
from baffle.task.load import load_task
from tests.support.solid_images import WRITERS

MOBILENET = 'task.model={name="mobilenet", weights="random", trained="head"}'


@pytest.fixture
def plan(tiny: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    WRITERS["pacs"](tmp_path / "data")
    monkeypatch.setenv("BAFFLE_DATA", str(tmp_path / "data"))
    return tiny('task.data="pacs"', "task.pixels=32", MOBILENET, "federation.batch=2", "rounds=2", "probe.k=2")


def test_a_run_says_that_its_pixels_were_scaled_once(plan: Plan) -> None:
    assert load_task(plan).plan.task.model == MobileNet(weights="random", scaling="once")
    assert load_task(plan).plan.trajectory_digest() != plan.trajectory_digest()


def test_an_older_run_of_a_mobilenet_verifies_but_is_neither_continued_nor_exported(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as older:
        older.setattr("baffle.runtime.torch.model.MobileNet", LeNet)  # version 0.1 filled nothing in
        simulate(plan, tmp_path / "run")
    assert load(str(tmp_path / "run" / "plan.toml")).task.model == MobileNet(weights="random")
    assert verify(tmp_path / "run").rounds == 2
    with pytest.raises(JournalError, match="not a resolved plan"):
        resume(tmp_path / "run", ["rounds=3"])
    with pytest.raises(ModelError, match=r"of version 0\.1.*task\.model\.scaling.*run the plan again"):
        export_run(tmp_path / "run", tmp_path / "model")
    shutil.rmtree(tmp_path / "run")


def test_a_pinned_plan_leaves_to_the_run_what_runs_fill_in() -> None:
    def with_model(model: MobileNet | Onnx) -> Plan:
        plan = load("digits")
        return msgspec.structs.replace(plan, task=msgspec.structs.replace(plan.task, model=model))

    assert not differences(with_model(MobileNet()), with_model(MobileNet(scaling="once")))
    assert not differences(with_model(Onnx()), with_model(Onnx(graph="0" * 64)))
