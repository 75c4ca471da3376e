"""fig-attack: what a server learns about a client from its scalars, from a secure sum of them, and from masked ones."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from baffle.client.abstaining import Tell
from baffle.core.arrays import F32, F64
from baffle.core.directions import GAUSSIAN, Directions, dense
from baffle.core.ports import Batch
from baffle.core.probe import forward_difference
from baffle.paper.fig_attack.attacks import (
    INPUT,
    INPUT_BLIND,
    LABELS,
    LABELS_BIAS,
    MEMBER,
    SIGMA,
    Case,
    Score,
    Size,
    attacked,
)
from baffle.paper.fig_attack.inference import auc, kolmogorov_smirnov
from baffle.paper.gradients import accuracy_of, measured_task, trained
from baffle.paper.target import Cell, Measurement, Result, Scale
from baffle.runtime.torch.loss import one_thread_each
from baffle.task.load import Task

COLOURS = ("#0b6e4f", "#3f88c5", "#d1495b", "#e0a030", "#555555")


Numbers = tuple[int, ...]


def _cases(softmax_ks: Numbers, lenet_ks: Numbers, softmax_batches: Numbers, lenet_batches: Numbers) -> list[Case]:
    """One case for each model and batch size; LeNet untrained and trained."""
    return [
        *(Case("softmax", False, batch, softmax_ks) for batch in softmax_batches),
        *(Case("LeNet", is_trained, batch, lenet_ks) for is_trained in (False, True) for batch in lenet_batches),
    ]


SIZES: Mapping[Scale, Size] = {
    "smoke": Size(_cases((16, 96), (16, 64), (1,), (4,)), 8, (4, 8), 1, 60, 2, 20, 30),
    "short": Size(_cases((16, 64, 256, 1280), (16, 64), (1, 8, 32), (1, 8)), 16, (4, 8, 16), 3, 300, 2, 100, 150),
    "full": Size(
        _cases((16, 64, 256, 1280), (16, 64, 256, 1024), (1, 8, 32), (1, 8, 32)), 64, (4, 16, 64), 8, 1000, 8, 500, 1000
    ),
}


def measure(scale: Scale, data: Path | None, tell: Tell) -> Result:
    """Figure 5, then every attack at every size."""
    size = SIZES[scale]
    with one_thread_each():
        tell("figure 5")
        lenet = measured_task(scale, data)
        trained_weights = trained(lenet, size.steps)
        states = {"untrained": lenet.initial_weights(), "trained": trained_weights}
        by_state = {state: differences(lenet, weights, size) for state, weights in states.items()}
        scores = list[Score]()
        for case in size.cases:
            tell(f"{case.title}, batch {case.batch}")
            scores += attacked(case, size, scale, data, trained_weights)
    separations = {state: separations_of(by_kind) for state, by_kind in by_state.items()}
    rows = [*rows_of_figure(separations, size), *rows_of_attacks(scores, size)]
    columns = ("what", "model", "batch", "K", "one client", *(f"sum of {c}" for c in size.sums), "masked", "chance")
    notes = [*notes_on(size, accuracy_of(lenet, trained_weights)), *findings(separations, scores, size)]
    raw = [score._asdict() | {"case": score.case._asdict()} for score in scores]
    record = {"told apart": separations, "scores": raw}
    return Result(columns, rows, notes, record, partial(_draw, by_state, scores, size))


# Of each round: figures by weights, kind of input and measure; and the ΔL of each kind of input.
Separations = Mapping[str, Mapping[str, Mapping[str, list[float]]]]
Differences = Mapping[str, Sequence[F64]]


def differences(task: Task, weights: F32, size: Size) -> dict[str, list[F64]]:
    """ΔL of `size.rounds` batches of each kind of input, all along the same directions."""
    runtime, random, test = task.runtime(), np.random.default_rng(5), task.source.test
    directions, supports = Directions(bytes(32), GAUSSIAN), dense(len(weights), size.differences)

    def real() -> Batch:
        return test.batch(random.choice(len(test), 8, replace=False))

    def noise(draw: Callable[..., F64]) -> Batch:
        x = draw(size=(8, *task.source.shape)).astype(np.float32)
        return Batch(x, random.integers(0, task.source.classes, 8))

    kinds: dict[str, Callable[[], Batch]] = {
        "real": real,
        "other real": real,
        "Gaussian": partial(noise, random.normal),
        "Laplacian": partial(noise, random.laplace),
    }

    def difference(batch: Batch) -> F64:
        return forward_difference(runtime.on(batch), weights, directions, supports, SIGMA).scalars * SIGMA

    return {kind: [difference(make()) for _ in range(size.rounds)] for kind, make in kinds.items()}


def separations_of(by_kind: Differences) -> dict[str, dict[str, list[float]]]:
    """For each other kind, batch by batch: how far single ΔL can be told from those of real data, and their spread."""
    pairs = {kind: list(zip(by_kind["real"], batches, strict=True)) for kind, batches in by_kind.items()}
    return {
        kind: {
            "ks": [kolmogorov_smirnov(a, b) for a, b in both],
            "auc": [auc(np.abs(b), np.abs(a)) for a, b in both],
            "spread": [float(np.std(b) / np.std(a)) for a, b in both],
        }
        for kind, both in pairs.items()
        if kind != "real"
    }


def _spread(values: Sequence[float]) -> str:
    """The mean over rounds, with the least and the most."""
    return f"{np.mean(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def rows_of_figure(separations: Separations, size: Size) -> list[list[Cell]]:
    """Figure 5 is about single clients, so the columns of sums and of masked vectors are empty."""
    none: list[Cell] = [None] * (len(size.sums) + 1)
    measures = {"ks": "KS", "auc": "AUC of its size", "spread": "spread of all K"}
    return [
        [
            *(f"figure 5, {kind} noise: {what}", f"LeNet, {state}", 8, size.differences),
            *(_spread(kinds[kind][measure]), *none, _spread(kinds["other real"][measure])),
        ]
        for state, kinds in separations.items()
        for kind in kinds
        if kind != "other real"
        for measure, what in measures.items()
    ]


def rows_of_attacks(scores: Sequence[Score], size: Size) -> list[list[Cell]]:
    """Attacks on labels at the largest K alone, the others at every K."""
    by_row: dict[tuple[str, Case, int], dict[int, list[Score]]] = {}
    for score in scores:
        if score.k == max(score.case.ks) or score.attack not in (LABELS, LABELS_BIAS):
            by_row.setdefault((score.attack, score.case, score.k), {}).setdefault(score.seen, []).append(score)
    rows = sorted(by_row.items(), key=lambda row: (row[0][0], row[0][1].title, *row[0][1:]))
    cells = list[list[Cell]]()
    for (attack, case, k), views in rows:
        values = [_spread([score.value for score in views[seen]]) for seen in (1, *size.sums, 0)]
        chances = [f"{np.mean([score.chance for score in views[seen]]):.2f}" for seen in (1, *size.sums)]
        chance = chances[0] if len(set(chances)) == 1 else " / ".join(chances)
        cells.append([attack, case.title, case.batch, k, *values, chance])
    return cells


def notes_on(size: Size, right: float) -> list[str]:
    return [
        f"Each figure is the mean over {size.rounds} round(s) (least to most), with fresh batches and directions. "
        f"σ = {SIGMA:g}, {size.clients} clients. Trained: {size.steps} steps of backpropagation, {right:.0%} right.",
        "Clients run the system's own code: they probe their batch and encode their scalars into the ring. One client: "
        "what the server reads with `secure.mode` off. Sum: what a real secure sum over that many clients gives it. "
        "Masked: a client's vector as it arrives in that secure sum, read as if it were not masked.",
        "Figure 5 compares ΔL of real samples with ΔL of noise that has random labels. KS is the largest difference "
        "between the two distribution functions: the best threshold on one ΔL is right in (1 + KS)/2 of the cases. AUC "
        "is how often noise gives the larger ΔL, regardless of sign. Spread is the standard deviation of all K, as a "
        "multiple of that of real data. Chance is the same measure between two batches of real data.",
        "Labels and membership are given as AUC. Labels: which ones a client has, from the rebuilt gradient of the "
        f"biases alone, or from the scalars that {size.public} public samples (of the test set) cause. Membership: a "
        "client's sample against samples of the same data set that no client used, by the likelihood ratio of the "
        "scalars that each would cause.",
        "Input: softmax regression with one sample a client. The figure is the cosine of the reconstruction with the "
        "sample, both without the mean image, so that 1 is exact. In a sum, the client that it resembles most counts. "
        "Chance is the likeness to equally many strangers, for one client and for each sum.",
    ]


def findings(separations: Separations, scores: Sequence[Score], size: Size) -> list[str]:
    """The findings of this run, in words."""
    figure = []
    for state, kinds in separations.items():
        chance = max(kinds["other real"]["ks"])
        noise = {kind: float(np.mean(measures["ks"])) for kind, measures in kinds.items() if kind != "other real"}
        apart = "no further" if max(noise.values()) <= chance else "further"
        named = " and ".join(f"{ks:.2f} ({kind})" for kind, ks in noise.items())
        figure.append(
            f"{state}, a single ΔL sets noise {apart} apart from real data than real batches from each other: KS "
            f"{named}, and at most {chance:.2f} between real batches"
        )
    smallest, largest = size.sums[0], size.sums[-1]
    views = {"one client": 1, f"a sum of {smallest}": smallest, f"a sum of {largest}": largest, "masked": 0}
    ranges = [
        f"{attack}: " + ", ".join(f"{_range(scores, attack, seen)} ({name})" for name, seen in views.items())
        for attack in (LABELS, MEMBER, INPUT)
    ]
    return [
        f"Figure 5: {'; '.join(figure)}.",
        f"The attacks at the largest K, least to most of the cases: {'; '.join(ranges)}.",
        "So figure 5 does not show that scalars hide data. Anyone who knows the seed has K linear measurements of a "
        "gradient and can compare them with those of a guess. The secure sum hides the scalars of single clients from "
        "the server: a masked vector is uniform in the ring, and its column shows what reading it is worth. It does "
        "not protect the sum itself. The columns above show how far attacks on the sum still succeed; more clients and "
        "larger batches weaken them, masks do not.",
    ]


def _range(scores: Sequence[Score], attack: str, seen: int) -> str:
    """The mean over rounds at the largest K, from the least to the most of all cases."""
    by_case: dict[Case, list[float]] = {}
    for score in scores:
        if (score.attack, score.seen, score.k) == (attack, seen, max(score.case.ks)):
            by_case.setdefault(score.case, []).append(score.value)
    means = [float(np.mean(values)) for values in by_case.values()]
    return f"{min(means):.2f}" if len(means) == 1 else f"{min(means):.2f} to {max(means):.2f}"


def _draw(by_state: Mapping[str, Differences], scores: Sequence[Score], size: Size, figure: Any) -> None:
    """Figure 5 at both states of the weights, then the scores of attacks against K and against the clients in a sum."""
    figure.set_size_inches(10, 6.6)
    panels = figure.subplots(2, 3)
    for axes, (state, kinds) in zip(panels[0], by_state.items(), strict=False):
        _histograms(axes, kinds)
        axes.set(title=f"figure 5: LeNet, {state}", xlabel="ΔL", yticks=[])
    largest = {score.case.model: max(score.case.ks) for score in scores}
    single = [score for score in scores if score.seen == 1]
    inputs = [score for score in single if score.attack in (INPUT, INPUT_BLIND)]
    sums = [score for score in scores if score.seen and score.k == largest[score.case.model]]

    def case_of(score: Score) -> str:
        return f"{score.case.title}, batch {score.case.batch}"

    _lines(panels[0][2], inputs, "k", lambda score: score.attack)
    panels[0][2].set(title="input, softmax, one client", xlabel="K", xscale="log", ylabel="cosine")
    panels[0][2].legend(frameon=False, fontsize=7)
    for axes, title, attack, seen, across in (
        (panels[1][0], "membership, one client", MEMBER, single, "k"),
        (panels[1][1], "membership, sum of C (largest K)", MEMBER, sums, "seen"),
        (panels[1][2], "labels, sum of C (largest K)", LABELS, sums, "seen"),
    ):
        _lines(axes, [score for score in seen if score.attack == attack], across, case_of)
        axes.set(title=title, xlabel="K" if across == "k" else "C", xscale="log", ylabel="AUC")
        axes.axhline(0.5, color="#999999", linewidth=0.8, linestyle="--")
        axes.set_ylim(0.4, 1.02)
    for axes, ticks in (
        *((axes, [1, *size.sums]) for axes in panels[1][1:]),
        (panels[0][2], sorted({score.k for score in single if score.attack == INPUT})),
        (panels[1][0], sorted({score.k for score in single})),
    ):
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
    for axes in panels.flat:
        axes.title.set_fontsize(9)
    lines = panels[1][0].get_legend_handles_labels()
    figure.legend(*lines, loc="outside lower center", ncols=4, fontsize=8, frameon=False)


def _histograms(axes: Any, kinds: Differences) -> None:
    """ΔL of real data and of each kind of noise. The outermost 2 % are cut off."""
    drawn = {kind: np.concatenate(list(batches)) for kind, batches in kinds.items() if kind != "other real"}
    edge = float(np.quantile(np.abs(np.concatenate(list(drawn.values()))), 0.98))
    bins = np.linspace(-edge, edge, 26).tolist()
    for (kind, values), colour in zip(drawn.items(), COLOURS, strict=False):
        axes.hist(values, bins, histtype="step", density=True, color=colour, label=kind)
    axes.ticklabel_format(axis="x", style="sci", scilimits=(0, 0))
    axes.legend(frameon=False, fontsize=7)


def _lines(axes: Any, scores: Sequence[Score], across: str, name: Callable[[Score], str]) -> None:
    """One line for each name: the mean over rounds, in a band from the least to the most. `across` is the field of a
    score that the x axis shows."""
    for number, line in enumerate(dict.fromkeys(map(name, scores))):
        points: dict[int, list[float]] = {}
        for score in scores:
            if name(score) == line:
                points.setdefault(getattr(score, across), []).append(score.value)
        x = sorted(points)
        colour = COLOURS[number % len(COLOURS)]
        dashed = "-" if number < len(COLOURS) else ":"
        axes.plot(x, [float(np.mean(points[at])) for at in x], "o" + dashed, color=colour, markersize=3, label=line)
        axes.fill_between(x, [min(points[at]) for at in x], [max(points[at]) for at in x], color=colour, alpha=0.15)


TARGET = Measurement(
    "fig-attack", "what scalars tell about a client: figure 5, and the attacks that it leaves out", measure, "mnist"
)
