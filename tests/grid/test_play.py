"""Playing a grid: finished runs are kept, stopped ones resumed, failures named, lost processes replaced; the same bits
whoever plays it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import baffle
from baffle.errors import GridError, PlanError, RunFolderError
from baffle.grid.job import RESTARTS, Event, Failure, Job, Player, TellEvent
from baffle.grid.play import Standing, play_grid, runner_of
from baffle.grid.processes import Processes
from baffle.grid.ray_cluster import RayCluster, pack, played_elsewhere, unpack
from baffle.grid.sweep import read_sweep, sweep
from baffle.plan import Plan
from baffle.server.recorder import Progress
from baffle.simulation import simulate
from baffle.version import __version__

MakePlan = Callable[..., Plan]
TWO = ["update.rate=0.003,0.01"]


def ignore(_event: Event, _standing: Standing | None = None) -> None:
    pass


def _weights(folder: Path) -> dict[str, str]:
    """The hash of the last weights of each run of a sweep, by its folder's name."""
    return {run.folder: baffle.verify(folder / run.folder).weights_sha256 for run in read_sweep(folder).runs}


@pytest.fixture
def alone(tiny: MakePlan, tmp_path: Path) -> dict[str, str]:
    """The weights of the grid's runs, each played without any other."""
    for path, rate in (("one", "0.003"), ("two", "0.01")):
        simulate(tiny(f"update.rate={rate}"), tmp_path / path)
    return {path: baffle.verify(tmp_path / path).weights_sha256 for path in ("one", "two")}


def test_a_sweep_in_one_process_has_the_bits_of_its_runs_alone_and_keeps_them(
    tiny: MakePlan, tmp_path: Path, alone: dict[str, str]
) -> None:
    swept = sweep(tiny(), tmp_path / "out", grid=TWO, jobs=1)
    assert list(_weights(tmp_path / "out").values()) == list(alone.values())
    assert swept.failures == {}
    summaries = [path / "summary.json" for runs in swept.rows().values() for path in runs.values()]
    before = [path.stat().st_mtime_ns for path in summaries]
    events = list[Event]()
    sweep(tiny(), tmp_path / "out", grid=TWO, seeds=[0, 1], jobs=1, watch=lambda event, _: events.append(event))
    assert [path.stat().st_mtime_ns for path in summaries] == before
    assert {event.name for event in events} == {"update.rate=0.003, seed 1", "update.rate=0.01, seed 1"}
    assert len(read_sweep(tmp_path / "out").runs) == 4


def test_a_stopped_run_goes_on_where_it_stopped(tiny: MakePlan, tmp_path: Path) -> None:
    whole = sweep(tiny(), tmp_path / "whole", jobs=1)
    (path,) = (tmp_path / "whole").glob("*/summary.json")
    half = tmp_path / "half" / path.parent.name
    simulate(tiny("rounds=2"), half)
    (half / "summary.json").unlink()
    text = (half / "plan.toml").read_text()
    (half / "plan.toml").write_text(text.replace("rounds = 2\n", f"rounds = {tiny().rounds}\n"))
    events = list[Event]()
    sweep(tiny(), tmp_path / "half", jobs=1, watch=lambda event, _: events.append(event))
    assert events[1].progress is not None
    assert events[1].progress.rounds_done > 2
    assert _weights(tmp_path / "half") == _weights(whole.folder)


def test_a_run_that_fails_is_named_and_the_others_go_on(tiny: MakePlan, tmp_path: Path) -> None:
    swept = sweep(tiny(), tmp_path / "out", grid=["task.data=cifar10,digits"], data=tmp_path, jobs=1)
    ((name, failure),) = swept.failures.items()
    assert name == "task.data=cifar10, seed 0"
    assert failure.no_data
    assert [len(runs) for runs in swept.summaries().values()] == [0, 1]
    with pytest.raises(GridError, match=r"1 of 2 runs failed, the others are kept: task\.data=cifar10, .*CIFAR"):
        swept.require_success()


def test_a_folder_whose_plan_names_other_functions_is_not_resumed(tiny: MakePlan, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "plan.toml").write_text(tiny().to_toml().replace('data = "digits"', 'data = "os:abort"'))
    failure = Player().play(Job("run", tiny(), folder), ignore)
    assert failure == Failure(f"{folder} holds another plan's run; move it away")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_time_left_follows_from_the_rounds_that_were_played_here(tiny: MakePlan, tmp_path: Path) -> None:
    clock, seen = Clock(), list[tuple[int, int, float | None]]()
    jobs = [Job(name, tiny("rounds=10"), tmp_path / name) for name in ("a", "b")]

    def runner(given: list[Job], tell: TellEvent) -> None:
        assert given == jobs
        tell(Event("a", "began"))
        for done in (6, 8):  # it is resumed after its fifth round
            clock.now += 10
            tell(Event("a", "going on", Progress(done, 10)))
        tell(Event("a", "failed", failure=Failure("a bad day")))
        clock.now += 10
        tell(Event("b", "ended"))

    failures = play_grid(jobs, runner, lambda _, now: seen.append((now.done, now.failed, now.seconds_left)), clock)
    assert failures == {"a": Failure("a bad day")}
    assert [(done, failed) for done, failed, _ in seen] == [(0, 0), (0, 0), (0, 0), (1, 1), (2, 1)]
    assert [left for *_, left in seen] == [
        None,
        pytest.approx(10 * 1.4 / 0.1),  # a tenth of a run took 10 s; 0.4 and 1 are left
        pytest.approx(20 * 1.2 / 0.3),
        pytest.approx(20 * 1.0 / 0.5),
        0.0,
    ]


def test_who_plays_is_chosen_by_a_word(tmp_path: Path) -> None:
    assert runner_of("local", 1) == Player()
    assert runner_of("local", 3, tmp_path) == Processes(3, tmp_path)
    assert runner_of("ray") == RayCluster()
    assert runner_of("ray://head:10001", 5, tmp_path) == RayCluster("ray://head:10001", 5, tmp_path)
    for word in ("rays", "Ray", "remote"):
        with pytest.raises(PlanError, match=r'--on: expected "local", "ray" or "ray://HOST:PORT"'):
            runner_of(word)


KILLED = """
import os, signal
from pathlib import Path
import numpy as np
import baffle

def data():
    x = np.random.default_rng(0).standard_normal((200, 1, 8, 8)).astype(np.float32)
    calls = []

    def prepare(samples):
        calls.append(0)
        marks = Path({marks!r})
        if len(calls) > 20 and len(list(marks.iterdir())) < {times}:
            (marks / str(os.getpid())).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return samples

    train = baffle.Dataset(x, np.arange(200) % 10, prepare)
    return baffle.Source(train, baffle.Dataset(x, np.arange(200) % 10), 10, shape=(1, 8, 8))
"""


@pytest.fixture
def deadly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], str]:
    """Data that kill the process which reads them, in the middle of its run, so many times."""

    def make(times: int) -> str:
        marks = tmp_path / "marks"
        marks.mkdir(exist_ok=True)
        (tmp_path / "deadly.py").write_text(KILLED.format(marks=str(marks), times=times))
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        return "task.data=deadly:data"

    return make


def _bits(folder: Path) -> list[str]:
    return list(_weights(folder).values())


@pytest.mark.slow
def test_a_killed_process_loses_nothing_but_time(tiny: MakePlan, tmp_path: Path, deadly: Callable[[int], str]) -> None:
    plan = tiny(deadly(0), "rounds=20")
    sweep(plan, tmp_path / "calm", grid=TWO, jobs=1)
    deadly(2)
    events = list[Event]()
    swept = sweep(plan, tmp_path / "out", grid=TWO, jobs=2, watch=lambda event, _: events.append(event))
    assert swept.failures == {}
    lost = [event.failure.words for event in events if event.kind == "lost" and event.failure]
    assert lost == ["its process died of signal 9"] * 2
    assert _bits(tmp_path / "out") == _bits(tmp_path / "calm")


@pytest.mark.slow
def test_a_run_that_kills_every_process_fails_and_the_others_go_on(
    tiny: MakePlan, tmp_path: Path, deadly: Callable[[int], str]
) -> None:
    axes = [f"{deadly(99)},digits"]
    swept = sweep(tiny("rounds=20"), tmp_path / "out", grid=axes, jobs=2)
    ((name, failure),) = swept.failures.items()
    assert name == "task.data=deadly:data, seed 0"
    assert f"signal 9, for the {RESTARTS + 1}th time" in failure.words
    assert len(_finished(tmp_path / "out")) == 1


def _finished(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/summary.json"))


def _command(out: Path, *more: str) -> list[str]:
    settings = [f"--set={one}" for one in ("rounds=40", "probe.k=8", "task.model={name='softmax'}", "secure.mode=off")]
    grid = ["--grid", "update.rate=0.003,0.01,0.03", "--seeds", "0..1", "--out", str(out)]
    return [sys.executable, "-m", "baffle.cli.main", "sweep", "digits", *settings, *grid, *more]


@pytest.mark.slow
def test_a_killed_sweep_is_started_again_and_ends_with_the_same_bits(tmp_path: Path) -> None:
    subprocess.run(_command(tmp_path / "calm", "--jobs=1", "--json"), check=True, capture_output=True)
    out = tmp_path / "out"
    with subprocess.Popen(_command(out, "--jobs=2"), stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        assert "finished" in killed.stdout.readline()
        killed.send_signal(signal.SIGKILL)
    kept = {path: path.stat().st_mtime_ns for path in _finished(out)}
    done = subprocess.run(_command(out, "--jobs=2", "--json"), check=True, capture_output=True, text=True)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert [len(row["seeds"]) for row in json.loads(done.stdout)["rows"]] == [2, 2, 2]
    assert _weights(out) == _weights(tmp_path / "calm")


def test_a_run_that_is_played_elsewhere_comes_back_whole(tiny: MakePlan, tmp_path: Path) -> None:
    simulate(tiny(), tmp_path / "here")
    packed, failure = played_elsewhere(__version__, "run", tiny().to_toml(), b"", None)
    assert failure is None
    unpack(packed, tmp_path / "there")
    here, there = (sorted(file.name for file in (tmp_path / place).iterdir()) for place in ("here", "there"))
    assert here == there
    weights = {baffle.verify(tmp_path / place).weights_sha256 for place in ("here", "there")}
    assert len(weights) == 1
    (tmp_path / "there" / "summary.json").unlink()  # it was stopped just before its end
    again, failure = played_elsewhere(__version__, "run", tiny().to_toml(), pack(tmp_path / "there"), None)
    assert failure is None
    unpack(again, tmp_path / "there")
    assert baffle.verify(tmp_path / "there").weights_sha256 in weights
    assert (tmp_path / "there").stat().st_mode & 0o077 == 0
    _, failure = played_elsewhere("0.1.0", "run", tiny().to_toml(), b"", None)
    assert failure is not None
    assert "install the same on both" in failure.words


@pytest.mark.slow
def test_a_lost_worker_of_ray_loses_nothing_but_time(
    tiny: MakePlan, tmp_path: Path, deadly: Callable[[int], str]
) -> None:
    pytest.importorskip("ray", reason="needs Ray: pip install 'baffle[simulation]'")
    plan = tiny(deadly(0), "rounds=20")
    sweep(plan, tmp_path / "calm", grid=TWO, jobs=1)
    half = next((tmp_path / "calm").glob("*/plan.toml")).parent
    unpack(pack(half), tmp_path / "out" / half.name)  # one that was stopped here goes on there
    (tmp_path / "out" / half.name / "summary.json").unlink()
    deadly(1)
    program = (
        "import sys; from pathlib import Path; from baffle.grid.sweep import sweep; from baffle.plan import parse\n"
        f"plan = parse(Path('plan.toml').read_text())\n"
        f"print(sweep(plan, Path('out'), grid={TWO!r}, on='ray').failures)"
    )
    (tmp_path / "plan.toml").write_text(plan.to_toml())
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.splitlines()[-1] == "{}"
    assert len(list((tmp_path / "marks").iterdir())) == 1, "a worker was killed"
    assert _bits(tmp_path / "out") == _bits(tmp_path / "calm")


@pytest.mark.parametrize(
    "text", ["", "[]", '{"command": "", "runs": [{"row": "a", "seed": 0, "folder": "../elsewhere"}]}']
)
def test_a_file_that_names_no_sweep_or_leads_out_of_it_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "sweep.json").write_text(text)
    with pytest.raises(RunFolderError, match=r"sweep\.json cannot be read"):
        read_sweep(tmp_path)
