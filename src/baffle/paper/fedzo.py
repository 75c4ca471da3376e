"""fedzo: other methods without backpropagation, compared with BAFFLE with shared and with own directions, on MNIST."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from baffle.client.abstaining import Tell
from baffle.grid.spread import letters_of
from baffle.paper.target import Cell, Finished, Result, Rows, Scale, Target, common_cells, range_of, row_of, spread_of
from baffle.paper.training_runs import STYLES, Curve, accuracy_of, curve
from baffle.plan import Plan, load

CLAIMED = 83.58  # FedZO's accuracy on MNIST after 1,000 rounds, in percent, as the paper cites it


@dataclass(frozen=True)
class Method:
    """One row: a preset, settings on top of it, and the paper's figure in percent."""

    preset: str
    settings: tuple[str, ...] = ()
    paper: float | None = None


@dataclass(frozen=True)
class Methods(Target):
    """Several methods: the accuracies that they reach, and the rounds, forward passes and bytes that this takes."""

    scales: Mapping[Scale, Mapping[str, Method]]
    notes: tuple[str, ...]

    def plans(self, scale: Scale) -> dict[str, Plan]:
        return {name: load(method.preset, method.settings) for name, method in self.scales[scale].items()}

    def result(self, rows: Rows, scale: Scale, _data: Path | None, _tell: Tell) -> Result:
        curves = {name: curve(runs) for name, runs in rows.items()}
        spreads = [spread_of(runs, accuracy_of) for runs in rows.values()]
        cells: list[dict[str, Cell]] = [
            {
                "": name,
                "accuracy, %": spread.mean,
                "least – most, %": range_of(spread),
                "equal": equal or None,
                "paper, %": self.scales[scale][row_of(name)].paper,
                **common_cells(runs),
                f"rounds to {CLAIMED} %": _arrival(runs),
                "bytes up": round(float(runs[0].summary["uplink_bytes_per_client_round"])),
            }
            for (name, runs), spread, equal in zip(rows.items(), spreads, letters_of(spreads), strict=True)
        ]
        more: Mapping[Scale, str] = {
            "short": "FedZO and DLZO run all their rounds, BAFFLE fewer than at full scale and no deep models.",
            "smoke": "On the digits, for a few rounds, to see that it works: the accuracies mean nothing.",
        }
        notes = [*self.notes, *([more[scale]] if scale in more else [])]
        return Result.of(cells, notes, {"curves": curves}, partial(_draw, rows, curves))


def _arrival(runs: Sequence[Finished]) -> int | None:
    """The rounds to the cited accuracy: those of the slowest seed, if all seeds reach it."""
    curves = [curve([run]) for run in runs]
    arrivals = [
        next((at for at, right in zip(of.rounds, of.mean, strict=True) if right >= CLAIMED), None) for of in curves
    ]
    return None if None in arrivals else max(at for at in arrivals if at is not None)


def _draw(rows: Rows, curves: Mapping[str, Curve], figure: Any) -> None:
    axes = figure.subplots()
    for name, runs in rows.items():
        curves[name].draw(axes, label=name, linestyle=STYLES[runs[0].plan.scalars])
    axes.axhline(CLAIMED, color="#bbbbbb", linewidth=1)
    axes.set(xscale="log", xlabel="round", ylabel="test accuracy, %")
    axes.legend(frameon=False, fontsize=7)


_OFF = "secure.mode=off"  # the same weights in less time
_SOFTMAX, _WRN = 'task.model={name="softmax"}', 'task.model={name="wrn"}'
_LENET, _BACK = "paper-mnist-lenet", "fedavg-mnist-lenet"


def _baffle(where: str, base: tuple[str, ...], ks: tuple[int, ...]) -> dict[str, Method]:
    """BAFFLE at batch level with shared and with own directions, and backpropagation, all at equal settings."""
    more: dict[str, tuple[str, ...]] = {
        f"K = {k}, {whose} directions": (f"probe.k={k}", f"federation.seeds={whose}")
        for k in ks
        for whose in ("shared", "own")
    }
    more["backpropagation"] = ("estimator=backprop",)
    base = ("federation.level=batch", _OFF, *base)
    return {f"{where}, {name}": Method(_LENET, (*base, *settings)) for name, settings in more.items()}


def _others(*settings: str) -> dict[str, Method]:
    return {
        "FedZO, softmax regression": Method("fedzo-mnist", settings, paper=CLAIMED),
        "DLZO, softmax regression": Method("dlzo-mnist", settings),
    }


_SMOKE = ("task.data=digits", "run.evaluate_every=1", _OFF)
_SMOKE_LENET = 'task.model={name="lenet", channels=[4, 8], head="flatten"}'

TARGET = Methods(
    "fedzo",
    "training without backpropagation: FedZO, DLZO, and BAFFLE with shared and with own directions",
    {
        "smoke": {
            **_others(*_SMOKE, "rounds=3"),
            **_baffle("softmax regression", (*_SMOKE, _SOFTMAX, "rounds=3"), (4,)),
            **_baffle("LeNet", (*_SMOKE, _SMOKE_LENET, "rounds=2"), (4,)),
        },
        "short": {
            **_others(_OFF),
            **_baffle("softmax regression", (_SOFTMAX, "rounds=200", "run.evaluate_every=5"), (20, 100)),
        },
        "full": {
            **_others(_OFF),
            **_baffle("softmax regression", (_SOFTMAX, "rounds=1000", "run.evaluate_every=10"), (20, 100, 500)),
            **_baffle("LeNet", ("rounds=3750", "run.evaluate_every=50"), (20, 100, 500)),
            "LeNet, K = 100, as in the authors' code": Method("authors-mnist-lenet", (_OFF,)),
            "LeNet, K = 500, epoch level": Method(_LENET, ("probe.k=500", _OFF), paper=92.18),
            "LeNet, backpropagation, epoch level": Method(_BACK, (_OFF,), paper=94.31),
            "WRN-10-2, K = 500, epoch level": Method(_LENET, ("probe.k=500", _WRN, _OFF), paper=95.17),
            "WRN-10-2, backpropagation, epoch level": Method(_BACK, (_WRN, _OFF), paper=97.11),
        },
    },
    (
        "The paper compares its 95.17 % after 20 rounds (WRN-10-2, K = 500, one local epoch a round) with FedZO's "
        f"{CLAIMED} % after 1,000 rounds. Neither the length of a round nor the size of the model is the same. Forward "
        "passes are those of all clients together; bytes are those of one client in one round, without a secure sum.",
        "FedZO and DLZO have settings of their own (`fedzo-mnist`, `dlzo-mnist`). Rows of the same model that differ "
        "in K, or in whose directions they use, differ in nothing else.",
    ),
)
