"""What fig-attack shows: its rows, its notes, and what it finds."""

from collections.abc import Sequence

import numpy as np

from baffle.paper.fig_attack.cases import INPUT, LABELS, LABELS_BIAS, MEMBER, SIGMA, Case, Score, Size
from baffle.paper.fig_attack.figure5 import Told
from baffle.paper.target import Cell


def _spread(values: Sequence[float], form: str = ".2f") -> str:
    """The mean of some rounds, with the least and the most."""
    mean, least, most = (format(one, form) for one in (np.mean(values), min(values), max(values)))
    return f"{mean} ({least} to {most})"


def rows_of_figure(told: Told, size: Size) -> list[list[Cell]]:
    none: list[Cell] = [None] * (len(size.sums) + 1)
    measures = {"ks": "KS", "auc": "AUC of its size", "spread": "spread of all K"}
    return [
        [
            *(f"figure 5, {kind} noise: {what}", f"LeNet, {state}", 8, size.differences),
            *(_spread(kinds[kind][measure]), *none, _spread(kinds["other real"][measure])),
        ]
        for state, kinds in told.items()
        for kind in kinds
        if kind != "other real"
        for measure, what in measures.items()
    ]


def rows_of_attacks(scores: Sequence[Score], size: Size) -> list[list[Cell]]:
    """Labels for the largest K alone, the others for every K."""
    found: dict[tuple[str, Case, int], dict[int, list[Score]]] = {}
    for one in scores:
        if one.k == max(one.case.ks) or one.attack not in (LABELS, LABELS_BIAS):
            found.setdefault((one.attack, one.case, one.k), {}).setdefault(one.seen, []).append(one)
    return [
        [
            *(attack, case.title, case.batch, k),
            *(_spread([one.value for one in views[seen]]) for seen in (1, *size.sums, 0)),
            _chance([[one.chance for one in views[seen]] for seen in (1, *size.sums)]),
        ]
        for (attack, case, k), views in sorted(found.items(), key=lambda one: (one[0][0], one[0][1].title, one[0][1:]))
    ]


def _chance(of_views: Sequence[Sequence[float]]) -> str:
    """One figure where all views have the same, else one for each."""
    means = [f"{np.mean(one):.2f}" for one in of_views]
    return means[0] if len(set(means)) == 1 else " / ".join(means)


def notes_on(size: Size, right: float) -> list[str]:
    return [
        f"Each figure is the mean over {size.rounds} round(s) (least to most), with fresh batches and directions. "
        f"σ = {SIGMA:g}, {size.clients} clients. Trained: {size.steps} steps of backpropagation, {right:.0%} right.",
        "Every client is the system's own: it probes its batch and encodes its scalars into the ring. One client: what "
        "the server reads with `secure.mode` off. Sum: what a real secure sum over so many clients gives it. Masked: a "
        "client's vector as it arrives in that secure sum, read as if it were not masked.",
        "Figure 5 compares ΔL of real samples with those of noise that has random labels. KS is the largest difference "
        "of two distribution functions: a best threshold on one ΔL is right in (1 + KS)/2 of the cases. AUC: how often "
        "noise gives the larger ΔL, regardless of sign. Spread: the standard deviation of all K, as a multiple of real "
        "data's. Chance is the same measure between two batches of real data.",
        "Labels and membership: AUC. Labels: which ones a client has, told by the rebuilt gradient of the biases "
        f"alone, or by the scalars that {size.public} public samples (of the test set) cause. Membership: a client's "
        "sample against samples of the same data set that nobody used, by the likelihood ratio of the scalars that "
        "each would cause.",
        "Input: softmax regression, one sample a client; cosine of the reconstruction with the sample, both less the "
        "mean image, so that 1 is exact. In a sum it counts for the client whom it is most like. Chance is the "
        "likeness to as many strangers, for one client and for each sum.",
    ]


def findings(told: Told, scores: Sequence[Score], size: Size) -> list[str]:
    """What holds, as far as the figures say it."""
    figure = []
    for state, kinds in told.items():
        chance = max(kinds["other real"]["ks"])
        noise = {kind: float(np.mean(found["ks"])) for kind, found in kinds.items() if kind != "other real"}
        apart = "no further" if max(noise.values()) <= chance else "further"
        named = " and ".join(f"{ks:.2f} ({kind})" for kind, ks in noise.items())
        figure.append(
            f"{state}, noise is {apart} from real data by single ΔL than real batches can be from each other: KS "
            f"{named}, {chance:.2f} at most between real batches"
        )
    largest = size.sums[-1]
    views = {"one client": 1, f"a sum of {size.sums[0]}": size.sums[0], f"a sum of {largest}": largest, "masked": 0}
    found = [
        f"{attack}: " + ", ".join(f"{_range(scores, attack, seen)} ({name})" for name, seen in views.items())
        for attack in (LABELS, MEMBER, INPUT)
    ]
    return [
        f"Figure 5: {'; '.join(figure)}.",
        f"The attacks at the largest K, least to most of the cases: {'; '.join(found)}.",
        "So what figure 5 shows does not mean that scalars hide data. Whoever knows the seed has K linear measurements "
        "of a gradient, and compares them with those of a guess. The secure sum takes the scalars of single clients "
        "from the server: a masked vector is uniform in the ring, and its column shows what reading it is worth. The "
        "secure sum does not protect what is in the sum itself: how far attacks on it still succeed is in the columns "
        "above, and more clients and larger batches, not masks, are what lowers it.",
    ]


def _range(scores: Sequence[Score], attack: str, seen: int) -> str:
    """The least and the most over cases of the mean over rounds, at the largest K."""
    of_case: dict[Case, list[float]] = {}
    for one in scores:
        if (one.attack, one.seen, one.k) == (attack, seen, max(one.case.ks)):
            of_case.setdefault(one.case, []).append(one.value)
    means = [float(np.mean(values)) for values in of_case.values()]
    return f"{min(means):.2f}" if len(means) == 1 else f"{min(means):.2f} to {max(means):.2f}"
