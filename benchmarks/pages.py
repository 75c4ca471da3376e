"""Fills the tables and draws the figures of the docs from the files in results/.

python benchmarks/pages.py            # write tables and figures
python benchmarks/pages.py --check    # name the pages whose tables differ from the results, and fail if there are any
"""

import argparse
import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import accuracy_page
import claims_page
import matplotlib as mpl
import privacy_page
import trade_page
from matplotlib import pyplot as plt
from tuning import PLANS as TUNED_PLANS, summary as tuning_summary

from baffle.paper.page import about_page
from baffle.paper.registry import TARGETS
from baffle.paper.text import made_by, markdown_of, table
from baffle.plan import load as load_plan

HERE = Path(__file__).resolve().parent.parent
NAMES = ("security", "performance", "edge", "deploy", "flower", "paper", "privacy", "tuning")
PAGES = ("README.md", *(f"docs/{name}.md" for name in NAMES))
ENCLAVE_MB = 90


def read(name: str) -> Any:
    return json.loads((HERE / "results" / f"{name}.json").read_text())


def rows(head: str, lines: list[str]) -> str:
    ruler = "|" + "---|" * (head.count("|") - 1)
    return "\n".join([head, ruler, *lines])


def digits() -> str:
    runs = read("digits")
    lines = [
        f"| {run['seed']} | {run['test_accuracy']:.2%} | {run['wall_seconds']:.0f} s | {run['bookkeeping_share']:.2%} |"
        for run in runs["runs"]
    ]
    table = rows("| seed | test accuracy | wall time | journal and metrics, share of the run |", lines)
    return f"{table}\n\nMedian {runs['median_accuracy']:.2%}, least {runs['least_accuracy']:.2%}."


def law_of_runs() -> str:
    lines = []
    for row in read("law-short")["rows"]:
        (probed, drawn), (low, high) = row["test_accuracy"]["means"], row["test_accuracy"]["interval"]
        gap = f"{100 * (drawn - probed):+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"
        lines.append(f"| {row['row']} | {probed:.1%} | {drawn:.1%} | {gap} | {row['test_accuracy']['p']:.2f} |")
    return rows("| row | probed | drawn | difference, points (95 % interval) | p |", lines)


def runtimes() -> str:
    lines = [
        f"| {row['model']} | {row['batch']} | {row['onnx_ms']:.0f} ms | {row['torch_ms']:.0f} ms | "
        f"{row['times']:.2f} | {row['losses_apart']:.0e} |"
        for row in read("runtimes")["rows"]
    ]
    head = "| model | batch | CPU a round, ONNX Runtime | PyTorch | PyTorch / ONNX Runtime | losses apart |"
    return rows(head, lines)


def sentences() -> str:
    names = {"probe": "forward passes, K = 50", "backprop": "backpropagation"}
    lines = [
        f"| {names[row['estimator']]} | {row['rate']} | {row['median']:.1%} | "
        f"{', '.join(f'{accuracy:.1%}' for accuracy in row['accuracies'])} | {row['cpu_seconds']:.0f} s |"
        for row in read("sentences")["rows"]
    ]
    return rows("| the head is trained by | rate | median | each seed | CPU of a run |", lines)


def fit_head() -> str:
    lines = [
        f"| {row['net']} | {row['way']} | {', '.join(f'{accuracy:.1%}' for accuracy in row['accuracies'])} |"
        for row in read("fit_head")
    ]
    return rows("| net | last layer, steps in a round | held-out accuracy, each seed |", lines)


def trials() -> str:
    """A line for each idea: its rate, alignment, and test accuracies in %."""
    lines = []
    for name, row in read("trials").items():
        net, way = name.split(" | ")
        runs, each = row["runs"], [100 * run["accuracy"] for run in row["runs"]]
        middle = f"{median(100 * run['at_half'] for run in runs):.1f} | {median(each):.1f}"
        spread = ", ".join(f"{accuracy:.1f}" for accuracy in each)
        alignment = f"{median(run['alignment'] for run in runs):.2f}"
        lines.append(f"| {net} | {way} | {row['rate']:g} | {alignment} | {middle} | {spread} |")
    return rows("| net | way | rate | alignment | after 150 | 300 rounds | each seed, after 300 |", lines)


def head_rounds() -> str:
    """Accuracies after some rounds, and the rounds to 85 %."""
    lines = []
    for name, curve in read("head_rounds").items():
        found, (end, best) = {rounds: f"{accuracy:.1%}" for rounds, accuracy in curve}, curve[-1]
        at = " | ".join(found.get(rounds, "–") for rounds in (100, 200, 300))
        lines.append(
            f"| {' | '.join(name.split('/'))} | {at} | {end if best >= 0.85 else f'more than {end} ({best:.1%})'} |"
        )
    return rows("| last layer | seed | after 100 rounds | 200 | 300 | rounds to 85 % |", lines)


def class_counts() -> str:
    lines = []
    for row in read("class_counts")["rows"]:
        noise = f"ε = {row['epsilon']}" if row["epsilon"] else "none"
        known = f"{row['mean_error']:.2f} | {row['exactly_known']:.0%}"
        lines.append(f"| {row['weights']} | {row['head']} | {noise} | {known} |")
    return rows("| weights | last layer | noise | mean error of a count | exactly right |", lines)


def default_plan() -> str:
    lines = []
    for row in read("default_plan")["rows"]:
        setting = dict(pair.split("=") for pair in row["settings"].split(","))
        lines.append(
            f"| {setting.get('probe.head', 'probed')} | {setting['probe.k']} | {setting['federation.batch']} | "
            f"{setting['rounds']} | "
            f"{setting['update.rate']} | {row['median']:.2%} | {row['least']:.2%} | {row['cpu_seconds']:.0f} s |"
        )
    return rows("| last layer | K | samples a client | rounds | rate | median accuracy | least | CPU of a run |", lines)


def local_steps() -> str:
    measured = read("local_steps")
    lines = []
    for row in measured["rows"]:
        runs = [run["accuracies"] for run in row["runs"]]
        lines.append(
            f"| {row['partition']} | {row['head']} | {row['steps']} | {row['rounds']} | "
            f"{' | '.join(f'{fmean(accuracies):.1%}' for accuracies in zip(*runs, strict=True))} | "
            f"{', '.join(f'{accuracies[-1]:.1%}' for accuracies in runs)} | "
            f"{fmean(run['uplink_bytes'] for run in row['runs']) / 1e3:,.0f} kB |"
        )
    after = " | ".join(f"{'after ' if not at else ''}{mark} steps" for at, mark in enumerate(measured["marks"]))
    return rows(f"| partition | head | P | rounds | {after} | each seed at the end | up |", lines)


def delay() -> str:
    found = sorted(read("delay")["rows"], key=lambda row: (row["k"], row["seed"], row["steps_a_round"]))
    lines = [
        f"| {row['k']} | {row['seed']} | {row['steps_a_round']} | {row['rounds']} | {row['steps']} | "
        f"{row['seconds']:.1f} s | {row['accuracy']:.1%} | {row['up_bytes'] / 1e3:,.0f} kB |"
        for row in found
    ]
    return rows("| K | seed | P | rounds | steps | seconds | accuracy | up |", lines)


def digits_crowd() -> str:
    clients = load_plan("digits-crowd").federation.clients
    lines = []
    for row in read("digits_crowd")["rows"]:
        setting = dict(pair.split("=") for pair in row["settings"].split(","))
        count = round(clients * float(setting["federation.participation"]))
        samples = "all" if setting["federation.batch"] == "0" else setting["federation.batch"]
        lines.append(
            f"| {setting['probe.k']} | {count} | {samples} | {setting['rounds']} | {setting['update.rate']} | "
            f"{row['median']:.2%} | {row['least']:.2%} | {row['cpu_seconds']:.0f} s |"
        )
    head = "| K | clients a round | their samples | rounds | rate | median accuracy | least | CPU of a run |"
    return rows(head, lines)


def tuning() -> str:
    lines = [
        f"| {row['plan']} | {row['start']} | {row['reference']:.1%} | {row['tuned']:.1%} | {_chosen(row['sigmas'])} | "
        f"{_chosen(row['rates'])} | {row['share']:.0%} |"
        for row in tuning_summary(read("tuning"))
    ]
    head = "| plan | start | by hand | tuned | σ chosen | rate chosen | forward passes of trials / of the run |"
    return rows(head, lines)


def horizons() -> str:
    results = read("tuning")
    lines = []
    for name in TUNED_PLANS:
        if not (row := results.get(f"{name}, rates and rounds")):
            continue
        cells = [f"{rate:g} ({count})" for rate, count in zip(row["best"], row["rounds"], strict=True)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return rows("| plan | a sixteenth of the run | an eighth | a quarter | a half | the whole |", lines)


def _chosen(values: list[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def secure_sum(part: str) -> Callable[[], str]:
    def table() -> str:
        head = "| clients | values | neighbours, t | dropped | ms: share / mask / agree / unmask | server | up | down |"
        return rows(head, [_secure_row(row) for row in read("secure_sum")[part]])

    return table


def _secure_row(row: dict[str, Any]) -> str:
    ms = row["client_ms"]
    agree = f"{ms['agree']:.1f}" if row["agreement"] else "–"
    return (
        f"| {row['clients']:,} | {row['k']:,} | {row['neighbours']}, {row['threshold']} | {row['dropout']:.0%} | "
        f"{ms['share']:.1f} / {ms['mask']:.1f} / {agree} / {ms['unmask']:.1f} | {row['server_cpu_seconds']:.2f} s | "
        f"{row['up_bytes']:,} | {row['down_bytes']:,} |"
    )


def ten_clients() -> str:
    measured = read("secure_sum")["ten clients, K = 20"]

    def span(name: str, *dropped: float) -> str:
        values = sorted(row[name] for row in measured if row["dropout"] in dropped)
        return f"{values[0]:.1f} to {values[-1]:.1f} ms"

    return (
        f"Ten clients at K = 20 take {span('all_cpu_ms', 0.0)} of CPU a round, all of them and the server together "
        f"({span('all_cpu_ms', 0.3)} when 30 % drop out); the cryptography alone takes "
        f"{span('primitives_ms', 0.0, 0.3)} of it."
    )


def poisoning() -> str:
    cosines = read("poisoning")["cosine"]
    bounds = list(next(iter(cosines.values())))
    lines = [
        f"| {name} | " + " | ".join(f"{row[bound]:+.3f}" for bound in bounds) + " |" for name, row in cosines.items()
    ]
    return rows(f"| | {' | '.join(bounds)} |", lines)


def schedules() -> str:
    tried = read("schedules")

    def count(outcome: str) -> int:
        return sum(kind.get(outcome, 0) for kind in tried["outcomes"].values())

    return (
        f"{tried['cases']:,} random schedules of lost, late, doubled, reordered and damaged messages: {count('sum'):,} "
        f"right sums, {count('no sum'):,} rounds without one, {count('sum with a damaged vector')} sums that took in a "
        f"vector damaged on the wire, {len(tried['violations'])} violations."
    )


FUZZED = {
    "stranger": "strangers at the port of a server, with and without TLS, while a client is connected and asked",
    "line": "clients of the roster over their lines: signed answers to all that a server asks from joining to the end, "
    "and damaged envelopes",
    "caller": "somebody in the server's place at a client's line: openings, handshakes, envelopes",
    "member": "a server that signs and lies, to a client before every message of a run",
    "run": "two of seven clients, in whole runs that must come to their end",
    "sum": "both ends of a secure sum, in every phase",
    "plan": "plans and policies, in files and from servers",
    "roster": "rosters, handed over and in folders",
    "file": "keys, certificates, marks, saved weights, crash records",
    "journal": "folders of runs: bytes, cells, tables, statements, certificates",
}


def fuzz() -> str:
    tried = read("fuzz_messages")
    lines = [
        f"| {what} | {area['messages']:,} | {area.get('refused', 0):,} | {area['grown_bytes'] / 2**20:.1f} MB |"
        for what, area in ((FUZZED[name], area) for name, area in tried["areas"].items())
    ]
    return f"{tried['messages']:,} malformed messages: {len(tried['violations'])} violations.\n\n" + rows(
        "| from whom, or what | messages | refused | growth of the process |", lines
    )


def probe() -> str:
    lines = [
        f"| {number} | {name} | {threads} | {row['ratio_to_reference']:.2f} ({row['best_ratio_to_reference']:.2f}) | "
        f"{row['ratio_to_kept_reference']:.2f} | {row['fraction_of_peak']:.0%} ({row['best_fraction_of_peak']:.0%}) | "
        f"{row['reference_fraction_of_peak']:.0%} | {row['forward_ms']:.1f} ms |"
        for number, run in enumerate(read("probe"), 1)
        for name, model in run.items()
        for threads, row in (("one", model), ("two", model["two_threads"]))
    ]
    head = "| run | model | threads | plain loop / ours | with memory kept | of peak | plain loop, of peak | a scalar |"
    return rows(head, lines)


def round_cost() -> str:
    lines = list[str]()
    for mode, row in read("round_cost").items():
        before, now = row["before"], row["now"]
        sizes = (f"{one['up']:,.0f} / {one['down']:,.0f}" for one in (before, now))
        change = f"{now['ms'] / before['ms'] - 1:+.1%}"
        lines.append(f"| `{mode}` | {before['ms']:.0f} ms | {now['ms']:.0f} ms | {change} | {' | '.join(sizes)} |")
    return rows("| mode | CPU of a round, before | now | change | bytes up / down, before | now |", lines)


def slowdown() -> str:
    lines = [
        f"| {number} | {plan} | {row['rounds']} | {row['round_cpu_ms']:,.0f} ms | {row['secure_cpu_ms']:.1f} ms | "
        f"{row['slower_by']:+.1%} |"
        for number, run in enumerate(read("secure_sum")["slowdown"], 1)
        for plan, row in run.items()
    ]
    return rows("| run | plan | rounds | CPU of a round without | secure sum | slower with it |", lines)


def server() -> str:
    lines = [_server_row(row) for row in read("server")["rows"]]
    return rows(
        "| weights | K | directions | whole, ns | in blocks, ns | ratio | replay | memory, whole → blocks |", lines
    )


def _server_row(row: dict[str, Any]) -> str:
    cpu, peak = row["cpu_ns_per_number"], row["peak_megabytes"]
    return (
        f"| {row['n']:,} | {row['k']} | {row['distribution']} | {cpu['reference']:.2f} | {cpu['rebuild']:.2f} | "
        f"{cpu['reference'] / cpu['rebuild']:.1f} | {row['cpu_seconds']['replay']:.3f} s | "
        f"{peak['reference']:.0f} → {peak['rebuild']:.0f} MB |"
    )


def replay() -> str:
    lines = list[str]()
    for row in read("replay")["replays"]:
        for kind, parts in row["parts_ms"].items():
            numbers = " | ".join(
                f"{parts[name]:.1f}" for name in ("drawing", "product", "optimizer", "average", "hash")
            )
            lines.append(f"| {row['plan']} | {kind} | {numbers} |")
    return rows("| update | directions | drawing | product | optimizer | average | hash |", lines)


def catching_up() -> str:
    ways = {"catch_up": "catching up", "catch_up_by_outcomes": "catching up, every state hashed", "audit": "`verify`"}
    lines = list[str]()
    for row in read("replay")["replays"]:
        for way, words in ways.items():
            cpu, times = row["cpu_ms_a_round"][way], row["times"][way]
            dense = " | ".join(f"{cpu[kind]:.1f} ms, {times[kind]:.1f} ×" for kind in ("gaussian", "rademacher"))
            lines.append(f"| {row['plan']} | {words} | {row['rounds'][way]:,} | {cpu['outer']:.1f} ms | {dense} |")
    return rows("| update | | rounds | outer, CPU a round | gaussian | rademacher |", lines)


def outer_server() -> str:
    row = read("replay")["server"]
    cpu, times = row["cpu_ns_per_number"], row["times"]
    return (
        f"The gradient of a matrix of {row['shape'][0]} × {row['shape'][1]} at K = {row['k']} takes the server "
        f"{cpu['outer']:.3f} ns a number; in the same run {cpu['rademacher']:.2f} ns with `rademacher`, "
        f"{times['rademacher']:.0f} times as much, and {cpu['gaussian']:.2f} ns with `gaussian`."
    )


def outer() -> str:
    lines = [
        f"| {row['model']} | {row['samples']} | {row['alone_ms']:.3f} ms | {row['together_ms']:.3f} ms | "
        f"{row['together'] if row['together'] > 1 else 'none'} | {row['times']:.1f} | "
        f"{row['times_in_one_batch']:.1f} | {row['auto']} |"
        for row in read("outer")["rows"]
    ]
    return rows(
        "| model | samples | a pass each | outer | share a pass | times cheaper | in one batch | `auto` chooses |",
        lines,
    )


def stacked() -> str:
    runtimes, sums = {"torch": "PyTorch", "onnx": "ONNX Runtime"}, {"off": "plain", "on": "secure"}
    lines = [
        f"| {runtimes[row['runtime']]} | {row['directions']} | {sums[row['secure']]} | "
        f"{'yes' if row['stacked'] else 'no'} | {row['cpu_seconds']:.2f} s |"
        for row in read("stacked")["rows"]
    ]
    return rows("| runtime | directions | sums | stacked | CPU of a round |", lines)


def any_net() -> str:
    """Accuracy against rounds: the median of the seeds, and each of them at the end."""
    runs = dict[tuple[str, ...], list[list[float]]]()
    for key, curve in read("any_net")["test"].items():
        net, way, rate, _ = key.split(" | ")
        runs.setdefault((net, way, rate), []).append(curve)
    nets, ways = list(dict.fromkeys(net for net, _, _ in runs)), list(dict.fromkeys(way for _, way, _ in runs))
    lines = []
    for net, way, rate in sorted(runs, key=lambda row: (nets.index(row[0]), ways.index(row[1]), row[2])):
        curves = runs[net, way, rate]
        medians = " | ".join(f"{100 * median(points):.0f}" for points in zip(*curves, strict=True))
        ends = ", ".join(f"{100 * curve[-1]:.0f}" for curve in curves)
        lines.append(f"| {net} | {way} | {rate} | {medians} | {ends} |")
    return rows("| net | directions | rate | after 75 | 150 | 225 | 300 rounds | each seed, after 300 |", lines)


def fitted() -> str:
    """The accuracy of `baffle.fit` after 150 rounds against backpropagation, each seed."""
    ends = dict[str, dict[str, list[float]]]()
    for key, curve in read("any_net")["fit"].items():
        net, way, _ = key.split(" | ")
        ends.setdefault(net, {}).setdefault(way, []).append(curve[-1])
    lines = [
        f"| {net} | " + " | ".join(", ".join(f"{100 * end:.1f}" for end in ways[way]) for way in WAYS_OF_FIT) + " |"
        for net, ways in ends.items()
    ]
    return rows("| net | `baffle.fit` | backpropagation |", lines)


WAYS_OF_FIT = ("fit", "backpropagation")


def layer_shares() -> str:
    """The mean accuracy on held-out samples, at the better rate of each net and way."""
    ends = dict[tuple[str, str, str], list[float]]()
    for key, curve in read("layer_shares").items():
        net, way, rate, _ = key.split(" | ")
        ends.setdefault((way, net, rate), []).append(curve[-1])
    best = dict[tuple[str, str], float]()
    for (way, net, _), accuracies in ends.items():
        best[way, net] = max(fmean(accuracies), best.get((way, net), 0.0))
    nets, ways = list(dict.fromkeys(net for _, net in best)), list(dict.fromkeys(way for way, _ in best))
    lines = [f"| {way} | " + " | ".join(f"{100 * best[way, net]:.0f}" for net in nets) + " |" for way in ways]
    return rows(f"| directions | {' | '.join(nets)} |", lines)


def contrast() -> str:
    parts = ("exact_factor", "exact_noise", "noise")
    lines = [
        f"| {net} | {row['layers']} | "
        + " | ".join(
            ", ".join(f"{number:.0f}" if number > 9.95 else f"{number:.1f}" for number in row[part]) for part in parts
        )
        + " |"
        for net, row in read("any_net")["contrast"].items()
    ]
    return rows(
        "| net | layers | gradients differ by a factor of | noise of dense directions | as `baffle plan` measures it |",
        lines,
    )


def duration() -> str:
    lines = [
        f"| {name} | {row['rounds']} | {row['predicted']:.1f} s | {row['taken']:.1f} s | {row['off']:+.0%} |"
        for name, row in read("duration")["rows"].items()
    ]
    return rows("| plan | rounds | predicted | taken | off by |", lines)


def memory() -> str:
    peak = read("scale")["peak_mb"]
    lines = [
        f"| {int(clients):,} | {mb:,.0f} MB |" if int(clients) else f"| only loaded | {mb:,.0f} MB |"
        for clients, mb in peak.items()
    ]
    return rows("| clients | peak memory, whole process |", lines)


def edge() -> str:
    found = read("edge")
    both = (found, found["exact_head"])
    stages = {"imports": "modules imported", "loaded": "model and data loaded", "peak": "peak over whole rounds"}
    lines = [
        f"| resident, MB: {name} | " + " | ".join(f"{one['memory_mb'][key]:.1f}" for one in both) + " |"
        for key, name in stages.items()
    ]
    lines.append("| CPU of a round | " + " | ".join(f"{one['cpu_seconds_per_round']:.2f} s" for one in both) + " |")
    lines.append("| a client's vector, bytes | " + " | ".join(f"{one['vector_bytes']:,}" for one in both) + " |")
    return rows("| | scalars alone | with an exact head |", lines)


def network() -> str:
    measured = read("network")
    lines = [_network_row("PyTorch", row) for row in measured["torch"]]
    lines.append(_network_row("ONNX Runtime", measured["onnx"]))
    head = (
        "| clients | seconds a round: median (range) | beyond the probes | "
        "transport, CPU ms a client and round | CPU ms a round: client / server | "
        "messages: up, down | on the wire: up, down |"
    )
    beyond = [str(row["bytes_beyond_messages_per_exchange"]) for row in measured["torch"]]
    waiting = measured["torch"][0]["waiting_bytes_per_second"]
    return (
        f"{rows(head, lines)}\n\n"
        f"All processes shared {measured['cores']} cores (load {measured['load_before']} before the first of them), so "
        f"CPU time is the better measure. TCP carries {' and '.join(beyond)} bytes beyond the messages for each "
        f"exchange, up and down together. A client that waits for a run to begin sends {waiting['up']:,} "
        f"bytes a second and receives {waiting['down']:,}."
    )


def _network_row(runtime: str, row: dict[str, Any]) -> str:
    cpu, own, wire = row["cpu_ms"], row["message_bytes"], row["wire_bytes"]
    return (
        f"| {row['clients']}, {runtime} | {_span(row['seconds'])} | {row['beyond_probes_seconds']:.2f} s | "
        f"{row['transport_ms']:.1f} | {cpu['client']:.0f} / {cpu['server']:.0f} | "
        f"{own['up']:,}, {own['down']:,} | {wire['up']:,}, {wire['down']:,} |"
    )


def _span(seconds: dict[str, float]) -> str:
    digits = 2 if seconds["median"] < 1 else 1
    return f"{seconds['median']:.{digits}f} ({seconds['least']:.{digits}f}–{seconds['most']:.{digits}f})"


def stock() -> str:
    measured = read("stock")
    lines = [f"| {row['clients']} | {_span(row['seconds'])} | {row['rounds']} |" for row in measured["stock"]]
    head = "| SuperNodes | seconds a round: median (range) | rounds |"
    return f"{rows(head, lines)}\n\n{measured['cores']} cores, load {measured['load_before']} before the first of them."


def chaos() -> str:
    run = read("chaos")
    blows, seconds = run["blows"], run["seconds_a_round"]
    words = {
        "kill client": "a client was killed",
        "kill server": "the server was killed",
        "stop client": "a client was stopped",
        "full client": "a client's disk was full",
        "full server": "the server's disk was full",
        "double client": "a second process came with a client's key",
    }
    dealt = ", ".join(f"{blows.get(blow, 0)} times {what}" for blow, what in words.items())
    verdict = "everybody held the same weights" if run["equal"] else f"not equal: {', '.join(run['others'])}"
    fire, calm = seconds["under fire"], seconds["calm"]
    return (
        f"{run['rounds']} rounds with {run['clients']} clients: {dealt}. {run['rounds_under_fire']} rounds were under "
        f"fire: they took {fire['median']:.1f} s in the median and {fire['mean']:.1f} s on average, the others "
        f"{calm['median']:.1f} s in the median. {run['skipped_rounds']} rounds were skipped, {run['dropouts']} "
        f"times a client was missing from a sum; at the end {verdict}, those of the replay "
        f"(accuracy {run['test_accuracy']:.1%})."
    )


LOADS = {
    "none": "nobody drops out",
    "break": "30 % break their line in each round",
    "silent": "30 % do not answer in each round",
    "stall": "5 % stop reading",
    "cut": "after all lines were cut",
    "restart": "after the server was killed",
}


def load() -> str:
    measured = read("load")
    by_scenario = {row["scenario"]: row for row in measured["scenarios"]}
    head = (
        "| | seconds a round: median (range) | skipped rounds | in a sum: median | server's CPU seconds a round: "
        "transport / secure sum / rest | server's peak | messages: up, down | on the wire: up, down |"
    )
    joined, warm, cut, restart = measured["join"], measured["warm_up"], by_scenario["cut"], by_scenario["restart"]
    busy = max(row["cores_busy_with_others"] for row in measured["scenarios"])
    return (
        f"{measured['clients']:,} clients at K = {measured['k']}, in {measured['processes']} processes on the same "
        f"{measured['cores']} cores as the server; other work kept up to {busy:.1f} cores busy.\n\n"
        f"{rows(head, [_load_row(row) for row in measured['scenarios']])}\n\n"
        f"All clients had joined after {joined['seconds']:.0f} s. A connection takes {joined['kb_a_connection']} kB of "
        f"the server's memory. In the first rounds clients get each other's lists of keys: the first one took "
        f"{warm['first_round_seconds']:.0f} s, and the server's memory peaked at {warm['server_peak_mb']:,.0f} MB. "
        f"With silent clients or slow readers a deadline of {by_scenario['silent']['deadline_seconds']:.0f} s ends the "
        f"exchange; the round in which clients stopped reading took {by_scenario['stall']['first_round_seconds']:.0f} "
        f"s. When all lines were cut in the middle of a round, everybody was connected again after "
        f"{cut['connected_again_seconds']:.1f} s, and the round was over after {cut['first_round_seconds']:.0f} s. A "
        f"killed server listened again after {restart['listening_again_seconds']:.1f} s, everybody was connected "
        f"{restart['connected_again_seconds']:.1f} s later, and its first round was over "
        f"{restart['first_round_seconds']:.0f} s after the round of the kill had begun: all keys are exchanged anew."
    )


def _load_row(row: dict[str, Any]) -> str:
    cpu, sizes = row["server_cpu_seconds"], row["client_bytes"]
    spent = " / ".join(f"{cpu[part]:.1f}" for part in ("transport", "secure_sum", "rest"))
    return (
        f"| {LOADS[row['scenario']]} | {_span(row['seconds'])} | {row['skipped']} of {row['rounds']} | "
        f"{row['contributors']['median']:,.0f} | {spent} | {row['server_peak_mb']:,.0f} MB | "
        f"{sizes['messages']['up']:,}, {sizes['messages']['down']:,} | "
        f"{sizes['tcp']['up']:,}, {sizes['tcp']['down']:,} |"
    )


def networked_edge() -> str:
    memory = read("network")["onnx"]["memory_mb"]
    stages = {"joined": "joined, before the model is loaded", "in rounds": "between rounds", "peak": "peak"}
    resident = rows(
        "| `baffle join --model` | resident, MB |", [f"| {name} | {memory[key]:.1f} |" for key, name in stages.items()]
    )
    over = memory["peak"] - ENCLAVE_MB
    verdict = f"missed by {over:.1f} MB" if over > 0 else "kept"
    return f"{resident}\n\nThe aim of {ENCLAVE_MB} MB, the size of a classic enclave, is {verdict}."


def of_paper(stem: str) -> str:
    """The table and the figure of a page that `baffle paper` made."""
    page = read(f"paper/{stem}")
    return f"{table(page['columns'], page['rows'])}\n\n{figure_of_paper(stem)}"


def scaled_once_and_twice() -> str:
    """Table 3 with pixels scaled once, compared with its older figures with pixels scaled twice."""

    def averages(stem: str) -> dict[str, float]:
        page = read(f"paper/{stem}")
        column = page["columns"].index("average")
        return {row[0]: float(row[column].split(" / ")[0]) for row in page["rows"]}

    once, twice = averages("table3-short"), averages("table3-short-scaled-twice")
    lines = [
        f"| {name} | {average:.2f} | {twice[name]:.2f} | {average - twice[name]:+.2f} |"
        for name, average in once.items()
        if name in twice
    ]
    return rows("| average top-1, % | scaled once | scaled twice | points gained |", lines)


def figure_of_paper(stem: str) -> str:
    """The figure of such a page, and the command that made it."""
    page = read(f"paper/{stem}")
    return f"![{page['target']}](../results/paper/{stem}.png)\n\n({made_by(page)}: [page](../results/paper/{stem}.md))"


PAPER = HERE / "results" / "paper"


def pages_of_paper() -> dict[Path, str]:
    """The pages of the paper's targets in the results, from their JSON. Older JSON does not say what it is about."""
    found = dict[Path, str]()
    for path in sorted(PAPER.glob("*.json")):
        page, figure = read(f"paper/{path.stem}"), path.with_suffix(".png")
        if path.with_suffix(".md").exists():
            page = {"about": about_page(TARGETS[page["target"]], page["scale"])} | page
            found[path.with_suffix(".md")] = markdown_of(page, figure.name if figure.exists() else "")
    return found


FORMS = {
    "float32": "floats",
    "dynamic": "dynamic int8",
    "QDQ": "static int8, QDQ",
    "QOperator": "static int8, QOperator",
}


def int8_windows() -> str:
    """The share of the attainable cosine at each σ, the lesser of both states."""
    found, lines = read("int8")["windows"], []
    names = {"QDQ, float biases, unrounded": "no activation", "QDQ, unrounded": "no activation"}
    names |= {"QDQ, float biases": "activations, static (QDQ)", "dynamic": "activations, dynamic"}
    names |= {"QDQ": "activations, static (QDQ)", "QOperator": "activations, static (QOperator)"}
    kinds = list(dict.fromkeys(name.split("/", 1)[1] for name in found))
    for scheme in ("forward", "central"):
        for part, form, directions in (kind.split("/") for kind in kinds):
            curves = [found[f"{state}/{part}/{form}/{directions}"][scheme] for state in ("MNIST", "digits")]
            least = [max(0.0, min(curve[sigma] for curve in curves)) for sigma in curves[0]]
            cells = " | ".join(f"{cosine:.2f}" for cosine in least)
            lines.append(f"| {scheme} | {directions} | {part} | {names[form]} | {cells} |")
    sigmas = " | ".join(f"σ = {float(sigma):g}" for sigma in curves[0])
    return rows(f"| differences | directions | moved | rounded to 8 bits | {sigmas} |", lines)


def int8_accuracy() -> str:
    found, lines = read("int8"), []
    for way in dict.fromkeys(name.rpartition("/")[0] for name in found["runs"]):
        by, form, parts = way.split("/")
        runs = [found["runs"][name] for name in found["runs"] if name.startswith(f"{way}/")]
        accuracies = [run["accuracy"] for run in runs]
        int8 = [run["int8_head"] for run in runs if "int8_head" in run]
        lines.append(
            f"| {FORMS[form]} | {found['before'][form]['accuracy']:.1%} | {parts} | {runs[0]['n']:,} | {by} | "
            f"{runs[0]['rate']:g} | {fmean(accuracies):.1%} ({min(accuracies):.1%} to {max(accuracies):.1%}) | "
            f"{f'{fmean(int8):.1%}' if int8 else '–'} | {fmean(run['cpu_seconds'] for run in runs):.0f} s |"
        )
    head = (
        "| the file | before | what trains | numbers | by | rate | accuracy of three seeds | head as int8 again | CPU |"
    )
    return rows(head, lines)


def int8_photographs() -> str:
    found, lines = read("int8"), []
    for form, estimators in found["photographs"].items():
        by = [
            f"{fmean(each['accuracies']):.1%} ({min(each['accuracies']):.1%} to {max(each['accuracies']):.1%})"
            for each in (estimators["probe"], estimators["backprop"])
        ]
        cost = found["costs"][form]
        megabytes = f"{cost['megabytes']} MB | {cost['peak_mb'] - cost['imports_mb']:.0f} MB"
        lines.append(f"| {FORMS[form]} | {' | '.join(by)} | {megabytes} | {cost['ms']} ms |")
    return rows("| backbone | forward passes | backpropagation | graph | memory | CPU of four images |", lines)


TABLES: dict[str, Callable[[], str]] = {
    **{f"paper {page.stem}": partial(of_paper, page.stem) for page in sorted(PAPER.glob("*.json"))},
    **{f"figure {page.stem}": partial(figure_of_paper, page.stem) for page in sorted(PAPER.glob("*.json"))},
    "table 3, scaled once and twice": scaled_once_and_twice,
    "claims": claims_page.claims,
    "baseline": trade_page.baseline,
    "decomfl": trade_page.decomfl,
    "decomfl, checks": trade_page.decomfl_checks,
    "tradeoffs": trade_page.tradeoffs,
    "not run": claims_page.not_run,
    "digits": digits,
    "law of runs": law_of_runs,
    "runtimes": runtimes,
    "fit head": fit_head,
    "trials": trials,
    "head rounds": head_rounds,
    "int8 windows": int8_windows,
    "int8 accuracy": int8_accuracy,
    "int8 photographs": int8_photographs,
    "class counts": class_counts,
    "default plan": default_plan,
    "local steps": local_steps,
    "delay": delay,
    "digits crowd": digits_crowd,
    "sentences": sentences,
    "tuning": tuning,
    "rates and rounds": horizons,
    "secure sum": secure_sum("K = 1000"),
    "secure sum, agreement": secure_sum("agreement"),
    "secure sum, vectors": secure_sum("vectors"),
    "ten clients": ten_clients,
    "poisoning": poisoning,
    "schedules": schedules,
    "fuzz": fuzz,
    "probe": probe,
    "slowdown": slowdown,
    "round cost": round_cost,
    "server": server,
    "outer": outer,
    "stacked": stacked,
    "outer server": outer_server,
    "replay": replay,
    "catching up": catching_up,
    "accuracy, MNIST": accuracy_page.accuracy("mnist"),
    "accuracy, USPS": accuracy_page.accuracy("usps"),
    "accuracy, trials": accuracy_page.trials,
    "any net": any_net,
    "fitted": fitted,
    "contrast": contrast,
    "duration": duration,
    "layer shares": layer_shares,
    "memory": memory,
    "edge": edge,
    "network": network,
    "load": load,
    "stock": stock,
    "chaos": chaos,
    "networked edge": networked_edge,
    "noise of a target": privacy_page.needed_noise,
    "privacy": privacy_page.accuracy,
    "privacy, choices": privacy_page.choices,
    "time of noise": privacy_page.drawn_in,
    "privacy, attacks": privacy_page.attacks,
}


def filled(text: str) -> str:
    """The page with new tables between `<!-- table: name -->` and `<!-- end -->`."""
    return re.sub(
        r"(<!-- table: (.+?) -->\n).*?(<!-- end -->)",
        lambda match: f"{match[1]}{TABLES[match[2]]()}\n{match[3]}",
        text,
        flags=re.DOTALL,
    )


def draw_scale() -> None:
    """Cost against K, weights, batch and clients, each with its fitted line."""
    lines = read("scale")["lines"]
    figure, panels = plt.subplots(1, len(lines), figsize=(11, 2.8))
    for axes, line in zip(panels, lines, strict=True):
        x, y, slope = line["x"], line["cpu_ms"], line["ms_for_one_more"]
        start = sum(y) / len(y) - slope * sum(x) / len(x)
        axes.plot(x, [start + slope * value for value in x], color="#bbbbbb", linewidth=1)
        axes.plot(x, y, "o", color="#0b6e4f", markersize=4)
        axes.set(xlabel=line["against"], title=f"{slope:.3g} ms for one more", ylim=(0, None))
        axes.title.set_fontsize(9)
    panels[0].set_ylabel("CPU ms")
    save(figure, "scale")


def save(figure: Any, name: str) -> None:
    figure.tight_layout()
    figure.savefig(HERE / "docs" / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    pages = {HERE / name: filled((HERE / name).read_text()) for name in PAGES} | pages_of_paper()
    if args.check:
        stale = [str(page.relative_to(HERE)) for page, text in pages.items() if page.read_text() != text]
        sys.exit(f"not what the results say: {', '.join(stale)}; run python benchmarks/pages.py" if stale else 0)
    for page, text in pages.items():
        page.write_text(text)
    mpl.use("svg")
    mpl.rcParams |= {"svg.hashsalt": "baffle", "axes.spines.top": False, "axes.spines.right": False, "font.size": 9}
    save(accuracy_page.draw_accuracy(), "time-to-accuracy")
    draw_scale()
    for name, draw in trade_page.FIGURES.items():
        if (trade_page.RESULTS / f"{name}.json").exists():
            save(draw(), name)
    save(privacy_page.draw_accuracy(), "privacy")


if __name__ == "__main__":
    main()
