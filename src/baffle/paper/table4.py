"""table4: the memory of one client, with backpropagation and with forward passes alone.

Each figure is measured in a fresh process: `python -m baffle.paper.table4 CASE`.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from baffle.client.abstaining import Tell
from baffle.core.directions import GAUSSIAN, Directions, dense
from baffle.core.freed_memory import give_back_freed_memory
from baffle.core.ports import Batch
from baffle.core.probe import losses_along
from baffle.errors import BaffleError
from baffle.paper.target import Cell, Measurement, Result, Scale
from baffle.plan import WRN, LeNet, MobileNet, Model

MEGABYTE, CLASSES, MICRO_BATCH = 1 << 20, 10, 8

MODELS: Mapping[str, Model] = {
    "LeNet": LeNet(),
    "WRN-10-2": WRN(),
    "MobileNetV2": MobileNet(weights="random", trained="all"),
}

PAPER = {
    ("LeNet", 32): (1680, "67–174"),
    ("LeNet", 224): (2527, "86–201"),
    ("WRN-10-2", 32): (1878, "75–196"),
    ("WRN-10-2", 224): (3425, "94–251"),
    ("MobileNetV2", 32): (2041, "102–217"),
    ("MobileNetV2", 224): (5271, "121–289"),
}
"""The paper's figures in MB on a GPU: backpropagation, and BAFFLE from least to most. It does not state the batch."""

ROWS: Mapping[Scale, tuple[tuple[str, int, int], ...]] = {  # model, pixels a side, and samples in a batch
    "smoke": (("LeNet", 32, 64),),
    "short": tuple((model, pixels, {32: 256, 224: 128}[pixels]) for model, pixels in PAPER),
    "full": tuple(
        (model, pixels, batch) for model, pixels in PAPER for batch in {32: (128, 256, 512), 224: (128,)}[pixels]
    ),
}

NOTES = (
    "A figure says how far the high-water mark of a fresh process (VmHWM, one thread, CPU) rises above what the "
    "process holds once it is set up. The set-up counts in no column: libraries, model, a copy of the weights, the "
    "batch, and what a pass with a single sample leaves behind (oneDNN's compiled kernels). On both sides freed "
    "memory goes back to the system at once, as with probe.memory_mb in a run. MB are 2²⁰ bytes.",
    "Forward is one loss along one direction and includes drawing the direction; further directions reuse the same "
    "memory. A whole batch runs layer by layer; of earlier layers, only the input of a residual block that is "
    "still running is held. Backpropagation is that of the baseline: autograd, float32, without checkpoints.",
    "At the same micro-batch both need little memory (column *forward of that*). Small micro-batches are a part of "
    "the gain, and backpropagation can have that part by accumulating gradients.",
    "The paper's figures are for a GPU and unknown batches: compare ratios. The models are ours, with random "
    "weights. MobileNetV2 has no normalisation, which makes backpropagation cheaper than it would be otherwise.",
)
FEW_NOTE = "The micro-batch columns run the first four micro-batches, with the whole batch loaded."


class Case(msgspec.Struct, frozen=True):
    """The work of one process. It loads `batch` samples and runs the first `used` of them, `micro_batch` at a time."""

    model: Model
    pixels: int
    batch: int
    used: int
    micro_batch: int
    backpropagates: bool


def measure(scale: Scale, _data: Path | None, tell: Tell) -> Result:
    """Measure peak memory on top of the model and the batch, which both kinds of client hold."""
    rows = list[list[Cell]]()
    measured = list[dict[str, Any]]()
    for name, pixels, batch in ROWS[scale]:
        tell(f"{name}, {pixels} × {pixels}, batch {batch}")
        few = batch if scale == "full" else 4 * MICRO_BATCH
        back, forward, back_few, forward_few = (
            in_fresh_process(Case(MODELS[name], pixels, batch, used, micro_batch, backpropagates))
            for used, micro_batch in ((batch, batch), (few, MICRO_BATCH))
            for backpropagates in (True, False)
        )
        measured.append(
            {"model": name, "pixels": pixels, "batch": batch, "micro_batch": MICRO_BATCH}
            | {"backpropagation": back, "forward": forward}
            | {"backpropagation_micro": back_few, "forward_micro": forward_few}
        )
        rows.append(
            [
                *(name, f"{pixels} × {pixels}", batch, _mb(back), _mb(forward), f"{forward / back:.1%}"),
                *(_mb(forward_few), f"{forward_few / back:.1%}", _mb(back_few), f"{forward_few / back_few:.1%}"),
                *PAPER[name, pixels],
            ]
        )
    columns = (
        *("model", "images", "batch", "backpropagation, MB", "forward, whole batch, MB", "of backpropagation"),
        *(f"forward, {MICRO_BATCH} at a time, MB", "of backpropagation (whole batch)"),
        *(f"backpropagation, {MICRO_BATCH} at a time, MB", "forward of that"),
        *("paper, backpropagation", "paper, BAFFLE"),
    )
    notes = NOTES if scale == "full" else (*NOTES, FEW_NOTE)
    return Result(columns, rows, notes, {"bytes": measured}, lambda figure: _draw(figure, measured))


def in_fresh_process(case: Case) -> int:
    """By how many bytes the case raises the high-water mark of a fresh process."""
    command = [sys.executable, "-m", "baffle.paper.table4", msgspec.json.encode(case).decode()]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        reason = process.stderr.strip().splitlines()[-1:] or [f"it ended with code {process.returncode}"]
        raise BaffleError(f"a process that measures memory failed, perhaps because it ran out of memory: {reason[0]}")
    return int(json.loads(process.stdout))


def rise(case: Case) -> int:
    """Called in a fresh process: set up, do the work once with a single sample, then measure it."""
    import torch

    from baffle.models.build import build
    from baffle.models.inputs import Inputs
    from baffle.runtime.torch.loss import TorchLoss, weights_of
    from baffle.runtime.torch.trials import grown

    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = build(case.model, Inputs((3, case.pixels, case.pixels), CLASSES))
    weights = weights_of(module)
    runtime = TorchLoss(module, micro_batch=case.micro_batch)
    give_back_freed_memory()
    random = np.random.default_rng(0)
    x = random.random((case.batch, 3, case.pixels, case.pixels), dtype=np.float32)
    y = random.integers(0, CLASSES, case.batch)

    def work(count: int) -> None:
        batch = Batch(x[:count], y[:count])
        if case.backpropagates:
            runtime.gradient_on(batch)(weights)
        else:
            # A client's smallest piece of work: the loss along one direction. Others reuse the same memory.
            losses_along(runtime.on(batch), weights, Directions(bytes(32), GAUSSIAN), dense(len(weights), 1), 1e-3)

    work(1)
    return grown(lambda: work(case.used))


def _mb(count: int) -> str:
    return f"{count / MEGABYTE:,.1f}"


def _draw(figure: Any, measured: list[dict[str, Any]]) -> None:
    axes = figure.subplots()
    kinds = {
        "backpropagation": "backpropagation",
        "forward": "forward, whole batch",
        "backpropagation_micro": f"backpropagation, {MICRO_BATCH} at a time",
        "forward_micro": f"forward, {MICRO_BATCH} at a time",
    }
    for number, (kind, label) in enumerate(kinds.items()):
        places = [row + 0.2 * number for row in range(len(measured))]
        axes.bar(places, [row[kind] / MEGABYTE for row in measured], 0.18, label=label)
    names = [f"{row['model']}\n{row['pixels']}², {row['batch']}" for row in measured]
    axes.set_xticks([row + 0.3 for row in range(len(measured))], names, fontsize=7)
    axes.set(yscale="log", ylabel="MB beside model and batch")
    axes.legend(frameon=False, fontsize=7)


TARGET = Measurement("table4", "peak memory of a client, backpropagation and forward passes alone", measure)

if __name__ == "__main__":
    sys.stdout.write(f"{rise(msgspec.json.decode(sys.argv[1], type=Case))}\n")
