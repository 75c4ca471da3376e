"""fig-attack: what a server learns about a client from its scalars, from a secure sum of them, and from masked ones."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from baffle.paper.fig_attack.attacks import attacked
from baffle.paper.fig_attack.cases import Case, Score, Size
from baffle.paper.fig_attack.drawing import draw
from baffle.paper.fig_attack.figure5 import differences, told_apart
from baffle.paper.fig_attack.report import findings, notes_on, rows_of_attacks, rows_of_figure
from baffle.paper.measured_task import accuracy_of, subject, trained
from baffle.paper.target import Finished, Result, Scale, Tell
from baffle.plan import Plan
from baffle.runtime.torch.loss import one_thread_each


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


@dataclass(frozen=True)
class Attack:
    name: str = "fig-attack"
    about: str = "what scalars tell about a client: figure 5, and the attacks that it leaves out"

    def plans(self, _scale: Scale) -> dict[str, Plan]:
        return {}

    def result(self, _runs: Mapping[str, Finished], scale: Scale, data: Path | None, tell: Tell) -> Result:
        size = SIZES[scale]
        with one_thread_each():
            tell("figure 5")
            lenet = subject(scale, data)
            after = trained(lenet, size.steps)
            states = {"untrained": lenet.initial_weights(), "trained": after}
            shown = {state: differences(lenet, weights, size) for state, weights in states.items()}
            scores = list[Score]()
            for case in size.cases:
                tell(f"{case.title}, batch {case.batch}")
                scores += attacked(case, size, scale, data, after)
        told = {state: told_apart(of_kind) for state, of_kind in shown.items()}
        rows = [*rows_of_figure(told, size), *rows_of_attacks(scores, size)]
        columns = ("what", "model", "batch", "K", "one client", *(f"sum of {c}" for c in size.sums), "masked", "chance")
        notes = [*notes_on(size, accuracy_of(lenet, after)), *findings(told, scores, size)]
        raw = [score._asdict() | {"case": score.case._asdict()} for score in scores]
        return Result(columns, rows, notes, {"told apart": told, "scores": raw}, partial(draw, shown, scores, size))


TARGET = Attack()
