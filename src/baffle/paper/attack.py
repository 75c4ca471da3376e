"""fig-attack: what a server learns about a client from its scalars, from a secure sum of them, and from masked ones."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from baffle.app.task import Task
from baffle.core.arrays import F32, F64, I64
from baffle.core.directions import GAUSSIAN, Directions, dense
from baffle.core.ports import Batch
from baffle.core.probe import forward_difference
from baffle.core.ring import RingVector
from baffle.paper.inference import (
    Public,
    auc,
    crowd,
    kolmogorov_smirnov,
    labels_by_bias,
    labels_by_samples,
    likeness,
    measure,
    membership,
    no_prior,
    prior_of,
    reconstruct,
)
from baffle.paper.overheard import Overheard, overhear
from baffle.paper.subject import accuracy_of, subject, trained
from baffle.paper.target import Cell, Finished, Result, Scale
from baffle.plan import Plan
from baffle.runtime.torch_loss import one_thread_each

SIGMA = 1e-4  # the paper's
MODELS: Mapping[str, tuple[str, ...]] = {
    "softmax": ("task.model={name='softmax'}",),
    "LeNet": (),
}
LABELS_BIAS, LABELS, MEMBER = "labels, from the biases", "labels, with public samples", "membership"
INPUT, INPUT_BLIND = "input, with public samples", "input, with no prior"
COLOURS = ("#0b6e4f", "#3f88c5", "#d1495b", "#e0a030", "#555555")


class Case(NamedTuple):
    """One model at some weights, batches of some size, and how many scalars a client sends."""

    model: str
    trained: bool
    batch: int
    ks: tuple[int, ...]

    @property
    def title(self) -> str:
        return f"{self.model}, {'trained' if self.trained else 'untrained'}"


class Size(NamedTuple):
    cases: tuple[Case, ...]
    clients: int
    sums: tuple[int, ...]
    rounds: int
    public: int
    targets: int  # inputs to reconstruct in a round
    differences: int  # ΔL of each kind of input
    steps: int  # of training


def _cases(
    softmax: tuple[int, ...], lenet: tuple[int, ...], of_softmax: tuple[int, ...], of_lenet: tuple[int, ...]
) -> tuple[Case, ...]:
    """For each model its K and its sizes of batches."""
    return (
        *(Case("softmax", False, batch, softmax) for batch in of_softmax),
        *(Case("LeNet", done, batch, lenet) for done in (False, True) for batch in of_lenet),
    )


SIZES: Mapping[Scale, Size] = {
    "smoke": Size(_cases((16, 96), (16, 64), (1,), (4,)), 8, (4, 8), 1, 60, 2, 20, 30),
    "short": Size(_cases((16, 64, 256, 1280), (16, 64), (1, 8, 32), (1, 8)), 16, (4, 8, 16), 3, 300, 2, 100, 150),
    "full": Size(
        _cases((16, 64, 256, 1280), (16, 64, 256, 1024), (1, 8, 32), (1, 8, 32)), 64, (4, 16, 64), 8, 1000, 8, 500, 1000
    ),
}


class Score(NamedTuple):
    """How well an attack went in one round, with what is seen (clients in the sum, 0: a masked vector)."""

    case: Case
    attack: str
    k: int
    seen: int
    value: float
    chance: float


@dataclass(frozen=True)
class Attack:
    name: str = "fig-attack"
    about: str = "what scalars tell about a client: figure 5, and the attacks that it leaves out"

    def plans(self, _scale: Scale) -> dict[str, Plan]:
        return {}

    def result(self, _runs: Mapping[str, Finished], scale: Scale, data: Path | None) -> Result:
        size = SIZES[scale]
        with one_thread_each():
            lenet = subject(scale, data)
            after = trained(lenet, size.steps)
            states = {"untrained": lenet.initial_weights(), "trained": after}
            shown = {state: differences(lenet, weights, size) for state, weights in states.items()}
            scores = [score for case in size.cases for score in attacked(case, size, scale, data, after)]
        told = {state: told_apart(of_kind) for state, of_kind in shown.items()}
        rows = [*_rows_of_figure(told, size), *_rows(scores, size)]
        columns = ("what", "model", "batch", "K", "one client", *(f"sum of {c}" for c in size.sums), "masked", "chance")
        notes = [*_notes(size, accuracy_of(lenet, after)), *_findings(told, scores, size)]
        raw = [score._asdict() | {"case": score.case._asdict()} for score in scores]
        return Result(columns, rows, notes, {"told apart": told, "scores": raw}, partial(draw, shown, scores, size))


# Figure 5: ΔL of real data and of noise.


def differences(task: Task, weights: F32, size: Size) -> dict[str, list[F64]]:
    """ΔL of several batches of each kind, all along the same directions."""
    runtime, random = task.runtime(), np.random.default_rng(5)
    directions, supports = Directions(bytes(32), GAUSSIAN), dense(len(weights), size.differences)
    shape, classes = task.source.shape, task.source.classes

    def labels() -> I64:
        return random.integers(0, classes, 8)

    def real() -> Batch:
        return task.source.test.batch(random.choice(len(task.source.test), 8, replace=False))

    kinds: dict[str, Callable[[], Batch]] = {
        "real": real,
        "other real": real,
        "Gaussian": lambda: Batch(random.normal(size=(8, *shape)).astype(np.float32), labels()),
        "Laplacian": lambda: Batch(random.laplace(size=(8, *shape)).astype(np.float32), labels()),
    }
    return {
        kind: [
            forward_difference(runtime.on(make()), weights, directions, supports, SIGMA).scalars * SIGMA
            for _ in range(size.rounds)
        ]
        for kind, make in kinds.items()
    }


def told_apart(of_kind: Mapping[str, Sequence[F64]]) -> dict[str, dict[str, list[float]]]:
    """For each kind but the first, batch by batch: how far single values of it can be told from real ones, and how the
    spread of all of them compares."""
    return {
        kind: {
            "ks": [kolmogorov_smirnov(a, b) for a, b in zip(of_kind["real"], several, strict=True)],
            "auc": [auc(np.abs(b), np.abs(a)) for a, b in zip(of_kind["real"], several, strict=True)],
            "spread": [float(np.std(b) / np.std(a)) for a, b in zip(of_kind["real"], several, strict=True)],
        }
        for kind, several in of_kind.items()
        if kind != "real"
    }


# The attacks.


def attacked(case: Case, size: Size, scale: Scale, data: Path | None, after: F32) -> Iterator[Score]:
    """All attacks of a case, round by round: fresh batches, fresh directions."""
    settings = (
        *MODELS[case.model],
        *(f"federation.clients={size.clients}", "federation.batch=0", f"ring.n_max={case.batch}"),
        *(f"probe.k={max(case.ks)}", f"probe.sigma={SIGMA}", "probe.distribution=gaussian", "probe.micro_batch=64"),
    )
    task = subject(scale, data, *settings)
    weights = after if case.trained else task.initial_weights()
    for number in range(size.rounds):
        order = np.random.default_rng(number).permutation(len(task.source.train))
        chosen = order[: size.clients * case.batch].reshape(size.clients, case.batch)
        heard = overhear(task, weights, list(chosen), number)
        # As many strangers as clients: samples of the training set that nobody has used.
        strangers = order[-size.clients :]
        yield from Server(task, weights, heard, size, case).attack(strangers)


@dataclass(frozen=True)
class Server:
    """Someone who knows the plan, the seed and the weights, has public samples, and reads what arrives."""

    task: Task
    weights: F32
    heard: Overheard
    size: Size
    case: Case

    def attack(self, strangers: I64) -> Iterator[Score]:
        train, test = self.task.source.train, self.task.source.test
        public = test.batch(np.arange(min(self.size.public, len(test))))
        known = Public(self._measured(public), public.y, self.task.source.classes)
        biases = self._drawn(self.heard.course.n - known.classes).astype(np.float64)
        own = self._measured(train.batch(np.array([batch[0] for batch in self.heard.batches])))
        foreign = self._measured(train.batch(strangers))
        views = list(self._views())
        for k in self.case.ks:
            few = known.first(k)
            others = crowd(few)
            for seen, groups in views:
                cut = [(members, scalars[:k]) for members, scalars in groups]
                score = partial(Score, self.case, k=k, seen=seen)
                held = [self._present(members) for members, _ in cut]
                for attack, guesses in (
                    (LABELS_BIAS, [labels_by_bias(scalars, biases[:k]) for _, scalars in cut]),
                    (LABELS, [labels_by_samples(scalars, few) for _, scalars in cut]),
                ):
                    there = [np.broadcast_to(g, h.shape)[h] for g, h in zip(guesses, held, strict=True)]
                    absent = [np.broadcast_to(g, h.shape)[~h] for g, h in zip(guesses, held, strict=True)]
                    yield score(attack=attack, value=auc(np.concatenate(there), np.concatenate(absent)), chance=0.5)
                samples = max(1, seen) * self.case.batch
                inside = [membership(s, own[:k, m], samples, others) for m, s in cut]
                outside = [membership(s, foreign[:k], samples, others) for _, s in cut]
                yield score(attack=MEMBER, value=auc(np.concatenate(inside), np.concatenate(outside)), chance=0.5)
                if (self.case.model, self.case.batch) == ("softmax", 1):
                    yield from self._inputs(cut, few, public, strangers, score)

    def _views(self) -> Iterator[tuple[int, list[tuple[list[int], F64]]]]:
        yield 1, self.heard.singly()
        masked: dict[int, RingVector] = {}
        for count in self.size.sums:
            sums, masked = self.heard.summed(count)
            yield count, sums
        yield 0, [([client], self.heard.read(vector)) for client, vector in masked.items()]

    def _present(self, members: Sequence[int]) -> NDArray[np.bool_]:
        """Which labels each client of a sum has, a row each."""
        every, labels = np.arange(self.task.source.classes), self.task.source.train.labels
        return np.array([np.isin(every, labels[self.heard.batches[client]]) for client in members])

    def _inputs(
        self,
        groups: Sequence[tuple[list[int], F64]],
        public: Public,
        samples: Batch,
        strangers: I64,
        score: Callable[..., Score],
    ) -> Iterator[Score]:
        """Reconstruct one input from each of a few sums; it counts for the client whom it is most like."""
        classes, k = public.classes, len(public.measured)
        pixels = samples.x[0].size
        # Weights come row by row and then the biases; as (K, classes, pixels + 1) they are easier to contract.
        z, weights = (_with_biases(flat, classes) for flat in (self._drawn(0)[:k], self.weights[None]))
        flat = samples.x.reshape(len(samples.x), -1).astype(np.float64)
        mean, informed = flat.mean(0), prior_of(flat)
        for attack, prior in ((INPUT, informed), (INPUT_BLIND, no_prior(pixels))):
            values, chances = list[float](), list[float]()
            for members, scalars in groups[: self.size.targets]:
                # The others of the sum are expected to be like public samples; how they differ is noise.
                alone = scalars * len(members) - (len(members) - 1) * public.measured.mean(1)
                noise = (len(members) - 1) * float(np.mean(np.var(public.measured, axis=1))) + 1e-6 * float(
                    np.mean(alone**2)
                )
                labels = np.argsort(-labels_by_samples(scalars, public))[:2]
                x, _ = reconstruct(alone, z, weights[0], prior, [int(one) for one in labels], noise)
                for who, into in ((self._first_samples(members), values), (strangers[: len(members)], chances)):
                    inputs = self.task.source.train.batch(who).x.reshape(len(who), -1).astype(np.float64)
                    into.append(max(likeness(x, one, mean) for one in inputs))
            yield score(attack=attack, value=float(np.mean(values)), chance=float(np.mean(chances)))

    def _first_samples(self, members: Sequence[int]) -> I64:
        return np.array([self.heard.batches[client][0] for client in members])

    def _drawn(self, start: int) -> F32:
        """What every direction does to the weights from `start` on."""
        course = self.heard.course
        directions = course.directions(self.heard.request.key)
        drawn = directions.draw(range(max(self.case.ks)), start, course.n)
        return drawn.astype(np.float32) * np.float32(directions.distribution.unit)

    def _measured(self, batch: Batch) -> F64:
        """What every sample alone would cause."""
        runtime = self.task.runtime()
        singles = (Batch(batch.x[i : i + 1], batch.y[i : i + 1]) for i in range(len(batch.y)))
        gradients = np.stack([runtime.gradient_on(one)(self.weights)[1] for one in singles]).astype(np.float64)
        directions = self.heard.course.directions(self.heard.request.key)
        return measure(directions, max(self.case.ks), gradients)


def _with_biases(flat: F32, classes: int) -> F32:
    rows, biases = flat[:, :-classes].reshape(len(flat), classes, -1), flat[:, -classes:]
    return np.concatenate([rows, biases[:, :, None]], axis=2)


# What is shown.


def _spread(values: Sequence[float], form: str = ".2f") -> str:
    """The mean of some rounds, with the least and the most."""
    mean, least, most = (format(one, form) for one in (np.mean(values), min(values), max(values)))
    return f"{mean} ({least} to {most})"


Told = Mapping[str, Mapping[str, Mapping[str, list[float]]]]
"""By weights, by kind of input, by measure: a figure for each round."""


def _rows_of_figure(told: Told, size: Size) -> list[list[Cell]]:
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


def _rows(scores: Sequence[Score], size: Size) -> list[list[Cell]]:
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


def _notes(size: Size, right: float) -> list[str]:
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


def _findings(told: Told, scores: Sequence[Score], size: Size) -> list[str]:
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
