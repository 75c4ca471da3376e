"""The target fig-attack: figure 5, then every attack at every size."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from baffle.paper.fig_attack.attacks import attacked
from baffle.paper.fig_attack.cases import Case, Score, Size
from baffle.paper.fig_attack.drawing import draw
from baffle.paper.fig_attack.figure5 import differences, separations_of
from baffle.paper.fig_attack.report import findings, notes_on, rows_of_attacks, rows_of_figure
from baffle.paper.measured_task import accuracy_of, measured_task, trained
from baffle.paper.target import Finished, Result, Scale, Tell
from baffle.plan import Plan
from baffle.runtime.torch.loss import one_thread_each


def _cases(
    softmax_ks: tuple[int, ...],
    lenet_ks: tuple[int, ...],
    softmax_batches: tuple[int, ...],
    lenet_batches: tuple[int, ...],
) -> tuple[Case, ...]:
    """One case for each model and batch size; LeNet untrained and trained."""
    return (
        *(Case("softmax", False, batch, softmax_ks) for batch in softmax_batches),
        *(Case("LeNet", is_trained, batch, lenet_ks) for is_trained in (False, True) for batch in lenet_batches),
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
        return Result(columns, rows, notes, record, partial(draw, by_state, scores, size))


TARGET = Attack()
