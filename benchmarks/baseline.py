"""Why backpropagation ends higher here than in the paper: table 1's row with what the authors' published code does.

    BAFFLE_DATA=... python benchmarks/baseline.py --out results/baseline.json    # minutes; goes on where it was

Their code (FengHZ/BAFFLE, main.py and utils/dataloader.py) differs from our plan in defaults of its own: pixels from 0
to 1 that are not scaled by mean and deviation, GroupNorm, a weight decay of 5e-4 that is added to Adam's gradient, and
a rate of 0.1. The paper does not say which of them the table used. They are tried alone (but for the rate) and
together, in runs of the table's length in which one client takes part in a round instead of ten.
"""

import argparse
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from kept import Kept
from training import training

from baffle import Dataset, Source
from baffle.core.arrays import F32
from baffle.data.handwriting import MNIST, mnist
from baffle.plan import load
from baffle.runtime.torch.loss import one_thread_each
from baffle.task.load import load_task

DECAY, NORM = ("update.weight_decay=5e-4",), ("task.model.norm=group",)
PIXELS, RATE = ("task.data=baseline:plain_pixels",), ("update.rate=0.1",)
VARIANTS: dict[str, tuple[str, ...]] = {
    "our plan": (),
    "pixels, weight decay, GroupNorm": (*PIXELS, *DECAY, *NORM),
    "pixels, weight decay, GroupNorm, rate 0.1": (*PIXELS, *DECAY, *NORM, *RATE),
    "weight decay 5e-4": DECAY,
    "pixels from 0 to 1": PIXELS,
    "GroupNorm": NORM,
}
MARKS = (2, 5, 10, 20)


def plain_pixels(data: Path | None) -> Source:
    """MNIST on 32 × 32 pixels from 0 to 1."""
    whole = mnist(data)

    def part(of: Dataset) -> Dataset:
        def prepare(samples: Any) -> F32:
            scaled: F32 = np.asarray(of.prepare(samples), np.float32) * np.float32(MNIST.deviation[0]) + np.float32(
                MNIST.mean[0]
            )
            return scaled

        return Dataset(of.samples, of.labels, prepare)

    return Source(lambda: part(whole.train), lambda: part(whole.test), classes=10, shape=whole.shape)


def played(settings: Sequence[str], marks: Sequence[int] = MARKS) -> dict[str, Any]:
    """A run of one client a round: its accuracy after some rounds."""
    shorter = ("estimator=backprop", "federation.participation=0.1", f"rounds={max(marks)}", "secure.mode=off")
    plan = load("paper-mnist-lenet", [*shorter, "run.workers=1", *settings])
    task, curve, seconds = load_task(plan), list[tuple[int, float]](), 0.0
    test = task.source.test.batch(np.arange(len(task.source.test)))
    with closing(training(task)) as rounds:
        for progress in rounds:
            if progress.rounds in marks:
                curve.append((progress.rounds, progress.accuracy(test)))
            seconds = progress.seconds
            if progress.rounds == max(marks):
                break
    return {"settings": list(settings), "curve": curve, "cpu_seconds": round(seconds, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="PATTERN", help="variants, as 'pixels*'")
    parser.add_argument("--out", type=Path, help="write results here, and continue from those that are already there")
    args = parser.parse_args()
    results = Kept(args.out, args.only or ["*"], ("runs",))
    with one_thread_each():
        for variant, settings in VARIANTS.items():
            results.note("runs", variant, partial(played, settings))


if __name__ == "__main__":
    main()
