"""The figure of fig-attack."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from baffle.core.arrays import F64
from baffle.paper.fig_attack.cases import INPUT, INPUT_BLIND, LABELS, MEMBER, Score, Size

COLOURS = ("#0b6e4f", "#3f88c5", "#d1495b", "#e0a030", "#555555")


def draw(shown: Mapping[str, Mapping[str, Sequence[F64]]], scores: Sequence[Score], size: Size, figure: Any) -> None:
    figure.set_size_inches(10, 6.6)
    panels = figure.subplots(2, 3)
    for axes, (state, kinds) in zip(panels[0], shown.items(), strict=False):
        drawn = {kind: np.concatenate(list(values)) for kind, values in kinds.items() if kind != "other real"}
        edge = float(np.quantile(np.abs(np.concatenate(list(drawn.values()))), 0.98))
        for (kind, values), colour in zip(drawn.items(), COLOURS, strict=False):
            axes.hist(
                values, np.linspace(-edge, edge, 26).tolist(), histtype="step", density=True, color=colour, label=kind
            )
        axes.set(title=f"figure 5: LeNet, {state}", xlabel="ΔL", yticks=[])
        axes.ticklabel_format(axis="x", style="sci", scilimits=(0, 0))
        axes.legend(frameon=False, fontsize=7)
    most = {one.case.model: max(one.case.ks) for one in scores}
    single = [one for one in scores if one.seen == 1]
    _lines(panels[0][2], [one for one in single if one.attack in (INPUT, INPUT_BLIND)], "k", lambda one: one.attack)
    panels[0][2].set(title="input, softmax, one client", xlabel="K", xscale="log", ylabel="cosine")
    _lines(panels[1][0], [one for one in single if one.attack == MEMBER], "k", _case_of)
    panels[1][0].set(title="membership, one client", xlabel="K", xscale="log", ylabel="AUC")
    whole = [one for one in scores if one.seen and one.k == most[one.case.model]]
    _lines(panels[1][1], [one for one in whole if one.attack == MEMBER], "seen", _case_of)
    panels[1][1].set(title="membership, sum of C (largest K)", xlabel="C", xscale="log", ylabel="AUC")
    _lines(panels[1][2], [one for one in whole if one.attack == LABELS], "seen", _case_of)
    panels[1][2].set(title="labels, sum of C (largest K)", xlabel="C", xscale="log", ylabel="AUC")
    for axes in panels[1]:
        axes.axhline(0.5, color="#999999", linewidth=0.8, linestyle="--")
        axes.set_ylim(0.4, 1.02)
    every_k = sorted({one.k for one in single})
    for axes, ticks in (
        *((axes, [1, *size.sums]) for axes in panels[1][1:]),
        (panels[0][2], sorted({one.k for one in single if one.attack == INPUT})),
        (panels[1][0], every_k),
    ):
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
    for axes in panels.flat:
        axes.title.set_fontsize(9)
    figure.legend(
        *panels[1][0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8, frameon=False
    )
    panels[0][2].legend(frameon=False, fontsize=7)


def _case_of(score: Score) -> str:
    return f"{score.case.title}, batch {score.case.batch}"


def _lines(axes: Any, scores: Sequence[Score], across: str, name: Callable[[Score], str]) -> None:
    """A line for each name: the mean over rounds, with the least and the most as a band."""
    for number, line in enumerate(dict.fromkeys(map(name, scores))):
        points: dict[int, list[float]] = {}
        for one in scores:
            if name(one) == line:
                points.setdefault(getattr(one, across), []).append(one.value)
        x = sorted(points)
        colour, dashed = COLOURS[number % len(COLOURS)], "-" if number < len(COLOURS) else ":"
        axes.plot(x, [float(np.mean(points[at])) for at in x], "o" + dashed, color=colour, markersize=3, label=line)
        axes.fill_between(x, [min(points[at]) for at in x], [max(points[at]) for at in x], color=colour, alpha=0.15)
