"""What fig-attack shows: its rows, its notes, and what it finds."""

from collections.abc import Sequence

import numpy as np

from baffle.paper.fig_attack.cases import INPUT, LABELS, LABELS_BIAS, MEMBER, SIGMA, Case, Score, Size
from baffle.paper.fig_attack.figure5 import Separations
from baffle.paper.target import Cell


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
    return [
        [
            *(attack, case.title, case.batch, k),
            *(_spread([score.value for score in views[seen]]) for seen in (1, *size.sums, 0)),
            _chance([[score.chance for score in views[seen]] for seen in (1, *size.sums)]),
        ]
        for (attack, case, k), views in sorted(by_row.items(), key=lambda row: _order(*row[0]))
    ]


def _order(attack: str, case: Case, k: int) -> tuple[str, str, Case, int]:
    return attack, case.title, case, k


def _chance(by_view: Sequence[Sequence[float]]) -> str:
    """One figure if all views have the same, otherwise one for each."""
    means = [f"{np.mean(chances):.2f}" for chances in by_view]
    return means[0] if len(set(means)) == 1 else " / ".join(means)


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
    """What the figures of this run say."""
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
    smallest = size.sums[0]
    largest = size.sums[-1]
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
