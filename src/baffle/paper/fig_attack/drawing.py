"""The figure of fig-attack."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from baffle.core.arrays import F64
from baffle.paper.fig_attack.cases import INPUT, INPUT_BLIND, LABELS, MEMBER, Score, Size

COLOURS = ("#0b6e4f", "#3f88c5", "#d1495b", "#e0a030", "#555555")


def draw(by_state: Mapping[str, Mapping[str, Sequence[F64]]], scores: Sequence[Score], size: Size, figure: Any) -> None:
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
    _lines(panels[0][2], inputs, "k", lambda score: score.attack)
    panels[0][2].set(title="input, softmax, one client", xlabel="K", xscale="log", ylabel="cosine")
    panels[0][2].legend(frameon=False, fontsize=7)
    _lines(panels[1][0], [score for score in single if score.attack == MEMBER], "k", _case_of)
    panels[1][0].set(title="membership, one client", xlabel="K", xscale="log", ylabel="AUC")
    _lines(panels[1][1], [score for score in sums if score.attack == MEMBER], "seen", _case_of)
    panels[1][1].set(title="membership, sum of C (largest K)", xlabel="C", xscale="log", ylabel="AUC")
    _lines(panels[1][2], [score for score in sums if score.attack == LABELS], "seen", _case_of)
    panels[1][2].set(title="labels, sum of C (largest K)", xlabel="C", xscale="log", ylabel="AUC")
    for axes in panels[1]:
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
    figure.legend(
        *panels[1][0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8, frameon=False
    )


def _histograms(axes: Any, kinds: Mapping[str, Sequence[F64]]) -> None:
    """ΔL of real data and of each kind of noise. The outermost 2 % are cut off."""
    drawn = {kind: np.concatenate(list(batches)) for kind, batches in kinds.items() if kind != "other real"}
    edge = float(np.quantile(np.abs(np.concatenate(list(drawn.values()))), 0.98))
    bins = np.linspace(-edge, edge, 26).tolist()
    for (kind, values), colour in zip(drawn.items(), COLOURS, strict=False):
        axes.hist(values, bins, histtype="step", density=True, color=colour, label=kind)
    axes.ticklabel_format(axis="x", style="sci", scilimits=(0, 0))
    axes.legend(frameon=False, fontsize=7)


def _case_of(score: Score) -> str:
    return f"{score.case.title}, batch {score.case.batch}"


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
