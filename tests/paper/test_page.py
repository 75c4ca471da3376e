"""Building pages: which rows a target runs and shows, rows without data, and rows that are added later."""

import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from baffle.errors import DataError, GridError, PageError, PlanError
from baffle.grid.job import Failure, Job, Player, TellEvent
from baffle.grid.play import runner_of
from baffle.grid.spread import Spread
from baffle.paper import gradients, page
from baffle.paper.page import Onlooker, Request, about_page, build_page
from baffle.paper.rates import FARTHEST, TRIAL_SEED
from baffle.paper.registry import TARGETS, target
from baffle.paper.target import Origin, Target
from baffle.paper.text import made_by, table
from baffle.paper.training_runs import Curve, Row, TrainingRuns
from baffle.plan import Plan


@contextmanager
def silence(*_label: str) -> Iterator[Callable[..., None]]:
    yield lambda *_report: None


def _target(**rows: Row) -> TrainingRuns:
    small = ("rounds=1", "probe.k=2", 'task.model={name="softmax"}')
    return TrainingRuns("some", "some rows", {"smoke": rows}, {"smoke": small})


THREE = _target(here=Row((), 40.0), there=Row(("probe.k=3",)), elsewhere=Row(("probe.k=4",)))


def _build(
    target: Target, folder: Path, only: Sequence[str] = (), out: str = "out", data: Path | None = None, **more: Any
) -> Path:
    asked = Request(only, **more)
    return build_page(target, "smoke", folder / "runs", folder / out, Onlooker(silence, silence), data, asked)


def test_rows_without_data_are_left_out_and_named_and_without_any_data_there_is_no_page(tmp_path: Path) -> None:
    elsewhere = Row(("task.data=cifar100",), 50.0)
    with pytest.raises(DataError, match="CIFAR-100"):
        _build(_target(there=elsewhere), tmp_path, data=tmp_path)
    assert not list(tmp_path.glob("**/*.md"))
    target = _target(here=Row((), 40.0), there=elsewhere, yonder=Row(("task.data=cifar100", "probe.k=3")))
    built = _build(target, tmp_path, data=tmp_path)
    assert [row[0] for row in json.loads(built.with_suffix(".json").read_text())["rows"]] == ["here"]
    (note,) = [line for line in built.read_text().splitlines() if line.startswith("Left out")]
    assert "there; yonder" in note
    assert "CIFAR-100" in note


def test_only_chooses_rows_by_name(tmp_path: Path) -> None:
    def chosen(*only: str) -> tuple[list[str], str]:
        built = _build(THREE, tmp_path, only, out="-".join(only))
        return [row[0] for row in json.loads(built.with_suffix(".json").read_text())["rows"]], built.read_text()

    rows, text = chosen("ERE")
    assert rows == ["here", "there", "elsewhere"]
    assert "Not asked for" not in text
    assert "--only" not in text
    rows, text = chosen("there", "else")
    assert rows == ["there", "elsewhere"]
    assert "Not asked for: 1 of 3 rows." in text
    assert "`baffle paper some --scale smoke --only there --only elsewhere`" in text
    rows, _ = chosen("Here")  # the whole name of a row, although "there" contains it too
    assert rows == ["here"]
    with pytest.raises(PlanError, match="here; there; elsewhere"):
        _build(THREE, tmp_path, ["yonder"])
    with pytest.raises(PlanError, match="theorem2 is measured as a whole"):
        _build(gradients.THEOREM2, tmp_path, ["10"])


def _page(target: Target, folder: Path, only: Sequence[str] = (), out: str = "out", **more: Any) -> dict[str, Any]:
    """The JSON of a page, built after all earlier runs are deleted."""
    shutil.rmtree(folder / "runs", ignore_errors=True)
    content: dict[str, Any] = json.loads(_build(target, folder, only, out, **more).with_suffix(".json").read_text())
    return content


def _without_timings(content: dict[str, Any]) -> dict[str, Any]:
    """The page without what differs between two runs of one plan: times and memory."""
    for run in content["runs"].values():
        for record in (run["summary"], *run["metrics"]):
            for key in [key for key in record if "seconds" in key or "_mb" in key or "share" in key]:
                del record[key]
    return content


@pytest.mark.slow
@pytest.mark.parametrize("order", list(permutations(["here", "there", "elsewhere"])), ids="-".join)
def test_rows_added_one_by_one_in_any_order_make_the_page_of_all(tmp_path: Path, order: tuple[str, ...]) -> None:
    whole = _page(THREE, tmp_path, out="whole")
    grown = [_page(THREE, tmp_path, [name]) for name in order]
    assert [len(page["rows"]) for page in grown] == [1, 2, 3]
    assert _without_timings(grown[-1]) == _without_timings(whole)
    for kind in (".md", ".png", ".html"):
        pages = [(tmp_path / out / f"some-smoke{kind}").read_bytes() for out in ("out", "whole")]
        one, other = (re.sub(rb"3 runs took [^,]+, added up", b"", page) for page in pages)
        assert one == other


def test_a_row_that_stays_keeps_its_date_and_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "_origin", lambda: Origin("2001-02-03", "abc"))
    _page(THREE, tmp_path, ["there"])
    monkeypatch.setattr(page, "_origin", lambda: Origin("2004-05-06", "def"))
    content = _page(THREE, tmp_path, ["here"])
    assert (content["date"], content["commit"]) == ("2004-05-06", "def")
    there, here = ({"date": "2001-02-03", "commit": "abc"}, {"date": "2004-05-06", "commit": "def"})
    assert {name: run["origin"] for name, run in content["runs"].items()} == {"here": here, "there": there}
    (line,) = [line for line in (tmp_path / "out" / "some-smoke.md").read_text().splitlines() if "`there`" in line]
    assert line.endswith("2001-02-03, commit abc")


def _without_data(monkeypatch: pytest.MonkeyPatch, k: int) -> None:
    """The data of runs with this K are gone."""

    def play(player: Player, job: Job, tell: TellEvent) -> Failure | None:
        return Failure("it is gone", no_data=True) if job.plan.probe.k == k else real(player, job, tell)

    real = Player.play
    monkeypatch.setattr(Player, "play", play)


@pytest.mark.slow
def test_a_row_stays_without_data_but_not_if_its_plan_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _page(THREE, tmp_path)
    _without_data(monkeypatch, 3)
    content = _page(THREE, tmp_path)
    assert [row[0] for row in content["rows"]] == ["here", "there", "elsewhere"]
    changed = _target(**{**THREE.rows["smoke"], "there": Row(("probe.k=5",))})
    assert [row[0] for row in _page(changed, tmp_path, ["here"])["rows"]] == ["here", "elsewhere"]


def test_a_row_that_fails_is_named_after_the_page_of_the_others_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def play(player: Player, job: Job, tell: TellEvent) -> Failure | None:
        return Failure("it broke") if job.plan.probe.k == 3 else real(player, job, tell)

    real = Player.play
    monkeypatch.setattr(Player, "play", play)
    with pytest.raises(GridError, match="1 of 3 runs failed, the others are kept: there: it broke"):
        _build(THREE, tmp_path)
    content = json.loads((tmp_path / "out" / "some-smoke.json").read_text())
    assert [row[0] for row in content["rows"]] == ["here", "elsewhere"]
    assert "Left out: there (it broke)." in content["notes"]
    with pytest.raises(GridError, match="there: it broke"):
        _build(THREE, tmp_path, ["there"], out="other")
    assert not (tmp_path / "other").exists()


def test_a_seed_that_fails_leaves_the_others_under_their_own_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def play(player: Player, job: Job, tell: TellEvent) -> Failure | None:
        return Failure("it broke") if job.plan.seed == 0 else real(player, job, tell)

    real = Player.play
    with monkeypatch.context() as patch:
        patch.setattr(Player, "play", play)
        with pytest.raises(GridError, match="here: it broke"):
            _build(THREE, tmp_path, ["here"], seeds=2)
    path = tmp_path / "out" / "some-smoke.json"
    first = json.loads(path.read_text())
    assert list(first["runs"]) == ["here, seed 1"]
    content = _page(THREE, tmp_path, ["here"])
    assert list(content["runs"]) == ["here", "here, seed 1"]
    assert content["weights"]["here, seed 1"] == first["weights"]["here, seed 1"]


def _column(content: dict[str, Any], name: str) -> list[Any]:
    return [row[content["columns"].index(name)] for row in content["rows"]]


def test_rows_of_several_seeds_have_mean_and_range_and_the_page_names_all_runs(tmp_path: Path) -> None:
    target = _target(here=Row(()), there=Row(("probe.k=3",)), back=Row(("estimator=backprop",)))
    content = _page(target, tmp_path, seeds=3)
    accuracies = {name: 100 * run["summary"]["test_accuracy"] for name, run in content["runs"].items()}
    assert list(accuracies) == [
        name + end for name in ("here", "there", "back") for end in ("", ", seed 1", ", seed 2")
    ]
    for place, name in enumerate(("here", "there", "back")):
        own = [accuracies[name + end] for end in ("", ", seed 1", ", seed 2")]
        assert len(set(own)) > 1
        assert _column(content, "accuracy, %")[place] == pytest.approx(sum(own) / 3)
        assert _column(content, "least – most, %")[place] == f"{min(own):.2f} – {max(own):.2f}"
        curve = Curve(*content["data"]["curves"][name])
        assert (curve.least[-1], curve.most[-1]) == (min(own), max(own))
        assert curve.mean[-1] == pytest.approx(sum(own) / 3)
    spreads = [
        Spread(tuple(accuracies[name + end] for end in ("", ", seed 1", ", seed 2"))) for name in ("here", "there")
    ]
    here, there, _ = _column(content, "equal")
    assert bool(set(here or "") & set(there or "")) == spreads[0].equals(spreads[1])
    assert _column(content, "seeds") == [3, 3, 3]
    assert _column(content, "scalars") == ["probed", "probed", "exact gradient"]
    text = (tmp_path / "out" / "some-smoke.md").read_text()
    assert "`baffle paper some --scale smoke --seeds 3`" in text
    assert "share a letter are equal" in text
    fewer = _page(target, tmp_path, ["here"])
    assert _column(fewer, "seeds") == [3, 3, 3]  # what is on the page stays


@pytest.mark.slow
def test_rates_are_chosen_on_held_out_training_samples_and_the_trials_are_on_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = list[Plan]()

    def play(player: Player, job: Job, tell: TellEvent) -> Failure | None:
        played.append(job.plan)
        return real(player, job, tell)

    real = Player.play
    monkeypatch.setattr(Player, "play", play)
    target = _target(here=Row(("rounds=4",)), back=Row(("rounds=4", "estimator=backprop")))
    content = _page(target, tmp_path, trials=0.5, seeds=2)
    for row, rate in zip(("here", "back"), _column(content, "rate"), strict=True):
        search = content["searches"][row]
        best = max(search["trials"], key=lambda trial: trial["accuracy"])
        assert rate == f"{search['rate']:g}"
        assert best["accuracy"] == next(t["accuracy"] for t in search["trials"] if t["rate"] == search["rate"])
        rates = sorted(trial["rate"] for trial in search["trials"])
        assert rates == [pytest.approx(rates[0] * 2**step) for step in range(len(rates))]
        assert search["rate"] not in (rates[0], rates[-1]) or len(rates) >= 3 + FARTHEST - 1
    trials = [plan for plan in played if plan.seed == TRIAL_SEED]
    assert all(plan.task.validation and plan.rounds == 2 for plan in trials)
    assert not any(plan.task.validation for plan in played if plan not in trials)
    assert {plan.seed for plan in played} == {0, 1, TRIAL_SEED}
    text = (tmp_path / "out" / "some-smoke.md").read_text()
    assert "`baffle paper some --scale smoke --seeds 2 --choose-rates 0.5`" in text
    assert f"| here | {_column(content, 'rate')[0]} | 2 | " in text
    only_back = _page(target, tmp_path, ["back"], trials=0.5, seeds=2)
    assert _without_timings(only_back)["runs"] == _without_timings(content)["runs"]
    played.clear()
    more = _page(target, tmp_path, ["back"], trials=0.5, seeds=3)  # the folders of all runs are gone
    assert [(plan.seed, plan.task.validation) for plan in played] == [(2, False)]
    assert _column(more, "seeds") == [2, 3]
    at_their_own = _page(target, tmp_path, seeds=2)  # without a search, the rows have their plans' own rate
    assert set(_column(at_their_own, "rate")) == {"0.01"}
    assert at_their_own["searches"] == {}


@pytest.mark.slow
def test_processes_and_one_process_make_the_same_page(tmp_path: Path) -> None:
    pages = list[dict[str, Any]]()
    for jobs in (1, 2):
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)
        onlooker, out = Onlooker(silence, silence), tmp_path / str(jobs)
        runner = runner_of("local", jobs)
        built = build_page(THREE, "smoke", tmp_path / "runs", out, onlooker, None, Request(seeds=2), runner)
        pages.append(json.loads(built.with_suffix(".json").read_text()))
    assert pages[0]["weights"] == pages[1]["weights"]
    assert pages[0]["rows"] == pages[1]["rows"]


def test_a_page_that_cannot_be_read_is_named_and_left_alone_and_one_without_runs_is_rebuilt(tmp_path: Path) -> None:
    path = tmp_path / "out" / "some-smoke.json"
    path.parent.mkdir()
    for text in ("", "[]", '{"runs": {"here": {"asked": "00"}}}'):
        path.write_text(text)
        with pytest.raises(PageError, match=r"some-smoke\.json cannot be read as a page"):
            _build(THREE, tmp_path, ["here"])
        assert path.read_text() == text
    path.write_text('{"target": "some", "rows": [["there", 1.0]]}')  # from before pages kept their runs
    assert [row[0] for row in _page(THREE, tmp_path, ["here"])["rows"]] == ["here"]


def test_a_page_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PageError, match=r"some-smoke cannot be written to .*finished runs are not lost"):
        _build(THREE, tmp_path, ["there"], out="file")
    (written,) = (path.stat().st_mtime_ns for path in (tmp_path / "runs").glob("*/summary.json"))
    _build(THREE, tmp_path, ["there"])
    assert [path.stat().st_mtime_ns for path in (tmp_path / "runs").glob("*/summary.json")] == [written]


def test_numbers_are_rounded_and_grouped_and_a_command_names_the_chosen_rows_as_a_shell_reads_them() -> None:
    assert table(("a", "b", "c", "d"), [["K = 20", 12.345678, 1234567, None]]) == (
        "| a | b | c | d |\n|---|---|---|---|\n| K = 20 | 12.35 | 1,234,567 | – |"
    )
    about = {"target": "table1", "scale": "full", "date": "2001-02-03", "commit": "abc"}
    assert made_by(about) == "`baffle paper table1 --scale full`, 2001-02-03, commit abc"
    chosen = made_by(about | {"only": ["K = 20", "back"]})
    assert chosen.startswith("`baffle paper table1 --scale full --only 'K = 20' --only back`, ")


def test_a_drawn_row_stands_beside_the_probed_one_and_the_page_says_which_is_which(tmp_path: Path) -> None:
    gaussian = ("probe.distribution=gaussian",)
    target = _target(here=Row(gaussian, 40.0), there=Row(()), back=Row(("estimator=backprop",)))

    _build(target, tmp_path, ["here"])
    page = _page(target, tmp_path, ["here", "back"], estimator="law")
    column = page["columns"].index("scalars")
    assert [(row[0], row[column]) for row in page["rows"]] == [
        ("here", "probed"),
        ("here, drawn", "drawn"),
        ("back", "exact gradient"),
    ]
    assert _column(page, "paper, %")[:2] == [40.0, 40.0]
    assert page["weights"]["here"] != page["weights"]["here, drawn"]
    assert any("probed nothing" in note for note in page["notes"])
    assert "Not asked for: 1 of 3 rows." in page["notes"]
    text = (tmp_path / "out" / "some-smoke.md").read_text()
    assert "- `here, drawn`: scalars drawn, plan " in text
    assert "- `here`: scalars probed, plan " in text
    command = "`baffle paper some --scale smoke"
    assert f"{command} --only here --only back` and {command} --estimator law --only here`" in text
    with pytest.raises(PlanError, match="has no row of Gaussian directions"):
        _build(THREE, tmp_path, estimator="law")
    with pytest.raises(PlanError, match="has no row of Gaussian directions"):
        _build(gradients.THEOREM2, tmp_path, estimator="law")


@pytest.mark.parametrize("name", TARGETS)
def test_a_page_names_the_data_that_it_ran_on(name: str) -> None:
    known = "MNIST|CIFAR|PACS|OfficeHome"
    assert not re.search(known, about_page(target(name), "smoke"))
    needs = set(re.findall(known, f"{', '.join(target(name).data('full'))}"))
    assert set(re.findall(known, about_page(target(name), "full"))) == needs


def test_a_page_looks_like_a_report_by_day_and_by_night(tmp_path: Path) -> None:
    html = _build(THREE, tmp_path).with_suffix(".html").read_text()
    assert "a smoke test: its figures mean nothing" in html
    assert re.findall("<h2>(.*?)</h2>", html) == ["Result", "Figure", "Origin"]
    dark, light = re.findall(r"data:image/png;base64,([^\"]+)", html)
    assert dark != light
    assert html.index(dark) < html.index('prefers-color-scheme: dark)"') < html.index(light)
