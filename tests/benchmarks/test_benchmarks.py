"""Every benchmark, shortened: people read and run them, so they must keep working."""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import baseline
import claims_page
import decomfl
import numpy as np
import pytest
from any_net import plan_of
from layer_shares import WAYS, estimate, lay_out
from trials import RATES, Net, Preconditioned

from baffle.core.directions import Support
from baffle.runtime.torch.loss import TorchLoss
from baffle.task.load import load_task

BENCHMARKS = Path(__file__).resolve().parent.parent.parent / "benchmarks"
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}  # where cores are busy, threads wait for each other for minutes


def printed(name: str, *args: str | Path) -> str:
    """What a benchmark prints."""
    command = [sys.executable, BENCHMARKS / f"{name}.py", *args]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=1800, env=ONE_THREAD).stdout


def run(name: str, *args: str) -> Any:
    """What a benchmark prints, read as JSON."""
    return json.loads(printed(name, *args, "--json"))


def written(name: str, folder: Path, *args: str) -> tuple[Any, str]:
    """What a benchmark writes to a file, and what it prints."""
    out = folder / "results.json"
    text = printed(name, *args, "--out", out)
    return json.loads(out.read_text()), text


@pytest.mark.slow
@pytest.mark.parametrize("extra", [[], ["--agreement"]], ids=["semi-honest", "agreement"])
def test_secure_sums_are_exact(extra: list[str]) -> None:
    rows = run("secure_sum", "--clients", "10", "--k", "50", *extra)
    assert [row["exact"] for row in rows] == [True, True]


def test_the_server_rebuilds_exactly() -> None:
    result = run("server", "--n", "20000", "--k", "20", "--repeat", "1")
    assert [row["exact"] for row in result["rows"]] == [True, True]


@pytest.mark.slow
def test_replays_of_both_kinds_of_directions_end_with_the_runs_hash() -> None:
    """The benchmark itself compares the hashes."""
    result = run("replay", "--rounds", "2", "--turns", "1")
    assert result["server"]["exact"]
    assert [row["plan"] for row in result["replays"]] == ["adam, average", "sgd"]
    assert all(spent > 0 for row in result["replays"] for spent in row["cpu_ms_a_round"]["audit"].values())


@pytest.mark.slow
def test_outer_directions_share_passes_and_agree_with_a_pass_each() -> None:
    rows = run("outer", "--k", "12", "--turns", "1", "--samples", "2")["rows"]
    assert [row["together"] for row in rows] == [12, 12, 12, 12]
    assert all(row["losses_apart"] < 1e-5 and row["times"] > 0 and row["times_in_one_batch"] > 0 for row in rows)
    assert rows[0]["auto"] == "outer"  # an MLP on two samples, many times cheaper


@pytest.mark.slow
def test_stacked_clients_are_measured_on_both_runtimes() -> None:
    rows = run("stacked", "--clients", "20", "--rounds", "1", "--turns", "1")["rows"]
    assert {(row["runtime"], row["stacked"]) for row in rows} == {*product(("onnx", "torch"), (False, True))}


@pytest.mark.slow
def test_costs_are_fitted_by_lines() -> None:
    result = run("scale", "--quick", "--turns", "1")
    assert [line["against"] for line in result["lines"]] == ["K", "weights", "batch", "clients"]
    assert result["peak_mb"]["0"] > 0


@pytest.mark.slow
def test_poison_spoils_one_sum_and_not_a_median() -> None:
    cosine = run("poisoning", "--rounds", "1")["cosine"]
    assert cosine["one sum"]["sum's range"] < 0 < 0.9 < cosine["20 groups, median"]["sum's range"]


@pytest.mark.slow
def test_time_to_accuracy_is_measured_with_the_best_of_equal_trials(data_folder: Path, tmp_path: Path) -> None:
    assert (data_folder / "mnist").is_dir()
    out = tmp_path / "results.json"
    modes = ("units", "authors", "backpropagation")
    short = ["time_to_accuracy", "--part", "0.002", "--out", str(out)]
    found = run(*short, *(f"--only=mlp/{mode}/*x*" for mode in modes), "--only=mlp/*/usps/2")
    for mode in modes:
        trials = {name: row for name, row in found["trials"].items() if name.startswith(f"mlp/{mode}/")}
        row = found["runs"][f"mlp/{mode}/usps/2"]
        assert len(trials) == 6
        assert trials[f"mlp/{mode}/{row['setting']}"]["accuracy"] == max(t["accuracy"] for t in trials.values())
        assert row["best_accuracy"] == max(accuracy for _, accuracy in row["curve"])
    assert run(*short, "--only=mlp/units/*x*", "--only=mlp/*/usps/2") == found


@pytest.mark.slow
def test_tuning_gives_every_start_the_same_advice(tmp_path: Path) -> None:
    shorter = ["--seeds", "1", "--set", "rounds=12", "--set", "probe.k=16", "--set", "federation.clients=4"]
    rows, text = written("tuning", tmp_path, "digits", *shorter)
    advice = [row["settings"] for name, row in rows.items() if name.endswith("tuning")]
    assert len(advice) == 4
    assert all(settings == advice[0] for settings in advice)
    assert text.count("reference") >= 4
    assert rows["digits, rates and rounds"]["rounds"] == [1, 2, 3, 6, 12]


@pytest.mark.slow
def test_nets_are_trained_in_different_ways() -> None:
    ways = ("layers, a moment each", "layers, exact head", "backpropagation")
    short = ["--set", "rounds=2", "--set", "run.evaluate_every=1", "--set", "probe.k=8"]
    found = run("any_net", "--net", "SqueezeNet-like", *(f"--way={way}" for way in ways), *short)
    assert {key.split(" | ")[1] for key in found["test"]} == set(ways)
    assert all(len(curve) == 2 for curve in found["test"].values())
    assert found["contrast"]["SqueezeNet-like"]["layers"] == 8


@pytest.mark.slow
def test_nets_as_people_bring_them_are_fitted() -> None:
    """With fewer rounds and directions; BERT needs a package that the tests do not install."""
    short = [part for setting in ("rounds=2", "run.evaluate_every=1", "probe.k=4") for part in ("--set", setting)]
    nets = ("tied MLP", "LSTM", "SqueezeNet-like")
    found = run("any_net", *(f"--fit={net}" for net in nets), *short)
    assert {(net, way) for net, way, _ in (key.split(" | ") for key in found)} == {
        (net, way) for net in nets for way in ("fit", "backpropagation")
    }
    assert all(len(curve) == 2 for curve in found.values())


@pytest.mark.slow
def test_durations_are_compared_with_runs_and_directions_shared_out_in_every_way(tmp_path: Path) -> None:
    found, _ = written("duration", tmp_path, "digits, the default", "--set", "rounds=4")
    row = found["rows"]["digits, the default"]
    assert row["predicted"] > 0 < row["taken"]
    found = run("layer_shares", "--net", "eight layers", "--seeds", "1", "--rounds", "2")
    assert [len(curve) for curve in found.values()] == [1] * 2 * 9


@pytest.mark.slow
def test_ideas_are_tried_at_the_same_rates(tmp_path: Path) -> None:
    ways = ("dense, Adam", "span of public inputs")
    found, _ = written("trials", tmp_path, "--net=six layers", *(f"--way={way}" for way in ways), "--rounds=2")
    assert set(found) == {f"six layers | {way}" for way in ways}
    for row in found.values():
        assert len(row["held_out"]) == len(RATES)
        assert row["rate"] == float(max(row["held_out"], key=lambda rate: fmean(row["held_out"][rate])))
        assert len(row["runs"]) == 5


@pytest.mark.slow
def test_rounds_are_counted_with_both_kinds_of_heads(data_folder: Path, tmp_path: Path) -> None:
    assert (data_folder / "mnist").is_dir()
    found, _ = written("head_rounds", tmp_path, "--rounds=50")
    assert {name: [rounds for rounds, _ in curve] for name, curve in found.items()} == {
        f"{head}/{seed}": [50] for head in ("exact", "probed") for seed in (0, 1)
    }


@pytest.mark.slow
def test_passes_scalars_bytes_and_hours_are_counted_on_real_runs(data_folder: Path, tmp_path: Path) -> None:
    assert (data_folder / "mnist").is_dir()
    found = decomfl.played(decomfl.plan_of("units, exact head", 0.002, 0), [80, 160])
    assert [point[:2] for point in found["curve"]] == [(80, 79 + 15_690), (160, 2 * (79 + 15_690))]
    assert found["weights"] == 28_938
    pixels = np.asarray(baseline.plain_pixels(data_folder).train.batch(np.arange(64)).x)
    assert (pixels.min(), pixels.max()) == (pytest.approx(0, abs=1e-6), pytest.approx(1, abs=1e-6))
    assert len(baseline.played(("federation.steps=1", *baseline.PIXELS), (1, 2))["curve"]) == 2
    costs, _ = written("tradeoffs", tmp_path, "--only", "FedSGD, 8 bits")
    assert costs["costs"]["FedSGD, 8 bits"]["bytes"] == 26_730 + 4 * 6
    hours, _ = written("hours", tmp_path, "--only", "table1: LeNet, MNIST")
    group = hours["groups"]["table1: LeNet, MNIST"]
    assert group["passes"]["LeNet, MNIST: K = 500"] == 501
    assert group["cpu_seconds"]["probed"] > group["cpu_seconds"]["drawn"] > 0


def test_a_verdict_is_that_of_its_comparisons() -> None:
    """Rows whose figures are switched turn a claim around; rows that are equal within their seeds bear out nothing."""
    table = claims_page.Table("none")
    table.rows = {"less": {"accuracy, %": 80.0}, "more": {"accuracy, %": 81.0}}
    good, bad = table.rising("less", "more"), table.rising("more", "less")
    assert [claims_page.verdict(checks) for checks in (good, bad)] == ["holds", "does not hold here"]
    assert claims_page.verdict([*good, *bad]) == "holds in part (1 of 2)"
    for row in table.rows.values():
        row["equal"] = "a"
    assert claims_page.verdict(table.rising("less", "more")) == "does not hold here"
    assert table.rising("less", "unknown") == []


def test_the_tables_in_the_docs_match_the_results() -> None:
    command = [sys.executable, str(BENCHMARKS / "pages.py"), "--check"]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_server_under_load_goes_on_in_every_scenario() -> None:
    """How many clients a round has is luck where 30 % drop out of each, and depends on the machine where a deadline is
    short. So there are enough of them, and time, that some round of each scenario has a sum."""
    size = 24
    settings = ("--rounds", "3", "--warm-up", "2", "--deadline", "30", "--least-deadline", "5")
    measured = run("load", "--clients", str(size), *settings)
    rows = {row["scenario"]: row for row in measured["scenarios"]}
    assert list(rows) == ["none", "break", "silent", "stall", "cut", "restart"]
    assert measured["run"]["rounds"] == 2 + 6 * 4 + 1
    assert rows["none"]["contributors"]["median"] == size
    for row in rows.values():
        assert row["contributors"]["most"] > 3, row
        assert row["skipped"] < row["rounds"], row
    assert all(rows[scenario]["contributors"]["least"] < size for scenario in ("break", "silent"))
    assert rows["none"]["client_exchanges"] == 2


@pytest.mark.slow
def test_accuracy_is_measured_against_epsilon_and_continued(tmp_path: Path) -> None:
    shorter = ["--seeds", "1", "--estimators", "probe", "--set", "rounds=2", "--set", "probe.k=10"]
    rows, _ = written("privacy", tmp_path, "digits", *shorter)
    spent = {row["epsilon"] for name, row in rows.items() if name.endswith("ε 8, seed 0")}
    assert all(7.99 < epsilon <= 8 for epsilon in spent)
    assert len(spent) == 1
    assert "epsilon" not in rows["digits, probe, ε 0, seed 0"]
    assert sum("choosing" in name for name in rows) == 3 + 5 + 5  # rates; clipping norms and two more rates, twice
    assert written("privacy", tmp_path, "digits", *shorter) == (rows, "")  # every row is in the file


@pytest.mark.slow
def test_attacks_get_less_from_a_sum_with_noise(tmp_path: Path) -> None:
    rows, _ = written("privacy_attacks", tmp_path, "softmax", "--quick")
    plain, noised = rows["softmax, no noise"], rows["softmax, ε 2 over 100 rounds"]
    assert plain["difference"] == {"membership": 1.0, "labels": 1.0, "input": 1.0} | {
        "input, by chance": plain["difference"]["input, by chance"]
    }
    assert abs(noised["difference"]["input"]) < 0.9
    assert 0.5 < noised["bound"] < 0.55


@pytest.mark.slow
def test_the_probe_is_compared_with_the_reference_and_the_peak() -> None:
    (row,) = run("probe", "--models", "lenet", "--directions", "1", "--repeat", "1").values()
    assert row["forward_gflop"] == 0.446
    assert row["ratio_to_reference"] > 0
    assert 0 < row["fraction_of_peak"] < 2


@pytest.mark.slow
def test_sums_on_a_bad_network_are_right_or_none() -> None:
    """The benchmark exits with 1 if it found a violation."""
    result = run("schedules", "--cases", "60")
    assert result["violations"] == {}
    outcomes = result["outcomes"]
    assert set(outcomes) == {"drops", "disorder", "damage"}
    assert sum(counts["case"] for counts in outcomes.values()) == 60
    assert all(counts["sum"] and counts["no sum"] for counts in outcomes.values())


LAYERS = (Support(0, 4), Support(4, 7, (12, 14)), Support(7, 12))
GRADIENT = np.linspace(-1, 2, 14, dtype=np.float32)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_share_directions_out_estimates_the_gradient(way: str) -> None:
    dense, shares, _ = WAYS[way]
    layout = lay_out(LAYERS, GRADIENT, 8, dense, shares)
    assert sum(entry.directions for entry in layout) == 8
    random = np.random.default_rng(0)
    mean = np.mean([estimate(GRADIENT, layout, random) for _ in range(3000)], axis=0)
    np.testing.assert_allclose(mean, GRADIENT, atol=0.2)


def _net() -> Net:
    task = load_task(plan_of("six layers", "dense", RATES[0], 0, held_out=False, settings=("run.runtime=torch",)))
    runtime = task.runtime()
    assert isinstance(runtime, TorchLoss)
    return Net(task, runtime, runtime._module, np.random.default_rng(0), task.initial_weights())


@pytest.mark.parametrize("where", ["rows", "columns", "preconditioned"])
def test_estimates_of_an_idea_tend_to_the_gradient_or_what_a_subspace_shows_of_it(where: str) -> None:
    net = _net()
    exact = net.random.standard_normal(net.head)
    expected, bases = exact.copy(), net.spans() if where == "rows" else net.subspaces()
    way = Preconditioned(net, RATES[0])
    way.state = (way.state[0], net.random.uniform(0.1, 10, len(net.weights)).astype(np.float32), *way.state[2:])
    for start, basis in bases.items() if where != "preconditioned" else ():
        m, n = net.matrices[start]
        matrix = exact[start : start + m * n].reshape(m, n)
        shown = matrix @ basis @ basis.T if where == "rows" else basis @ basis.T @ matrix
        expected[start : start + m * n] = shown.reshape(-1)
    estimates = [
        way.estimate(exact, 0) if where == "preconditioned" else net.within(exact, bases, rows=where == "rows")
        for _ in range(600)
    ]
    error = np.linalg.norm(np.mean(estimates, axis=0) - expected)
    assert error < 0.5 * np.linalg.norm(expected)
    assert error < 0.1 * np.linalg.norm(np.asarray(estimates) - expected, axis=1).mean()
