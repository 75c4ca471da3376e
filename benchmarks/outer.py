"""What a scalar costs a client: many outer directions in one pass, against one pass a direction.

    python benchmarks/outer.py                              # a table
    python benchmarks/outer.py --json > results/outer.json

All ways run in one process on one thread, in turns, on PyTorch. A turn is a probe along K directions as a client takes
it: drawing, moving and forward passes. Its CPU time is that of the least turn, so that other work on the machine, which
can only add to it, counts least. One pass a direction has dense directions of ±1, the quickest to draw. For
comparison, a direction's samples in one large batch of the plain module, without any direction: arithmetic alone.
`auto` is what `probe.supports = "auto"` measures and chooses, dense or outer directions.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from baffle.core.arrays import F32
from baffle.core.directions import OUTER, RADEMACHER, Directions, dense, distribution_of
from baffle.core.ports import Batch
from baffle.core.probe import forward_difference
from baffle.models.inputs import Inputs
from baffle.models.networks import build_lenet
from baffle.plan import LeNet, load
from baffle.runtime.torch.loss import TorchLoss, cross_entropy, one_thread_each, weights_of
from baffle.runtime.torch.trials import LEAST, bytes_each, how_many
from baffle.stopwatch import Stopwatch
from baffle.task.prices import Price, quickest_kind, seconds_of_scalar
from baffle.task.settle import SHARED_PASS

CLASSES, TOKENS, WORDS, WIDTH = 10, 16, 100, 128
SIGMA = 1e-3


class Transformer(nn.Module):
    """Two layers over 16 tokens, of which token 0 is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.positions = nn.Parameter(torch.randn(TOKENS, WIDTH) * 0.1)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.layers(self.tokens(tokens) + self.positions, src_key_padding_mask=tokens == 0)
        logits: Tensor = self.head(x.mean(1))
        return logits


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, CLASSES))


def demo() -> nn.Module:
    return build_lenet(LeNet(channels=(8, 16), head="flatten", norm="group"), Inputs((1, 8, 8), CLASSES))


def paper() -> nn.Module:
    return build_lenet(LeNet(channels=(16, 64), head="average"), Inputs((1, 28, 28), CLASSES))


def floats(*shape: int) -> Callable[[int], Any]:
    return lambda count: np.random.default_rng(0).normal(size=(count, *shape)).astype(np.float32)


def sentences(count: int) -> Any:
    return np.random.default_rng(0).integers(0, WORDS, (count, TOKENS))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "MLP, 256-512-512-10": (mlp, floats(256)),
    "transformer, two layers of 128, 16 tokens": (Transformer, sentences),
    "the demo's LeNet": (demo, floats(1, 8, 8)),
    "the paper's LeNet, 28 × 28 pixels": (paper, floats(1, 28, 28)),
}


def cpu_seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def measured(name: str, samples: int, k: int, turns: int) -> dict[str, Any]:
    """One row: CPU time of a scalar each way, and how far losses are apart."""
    make, data = MODELS[name]
    torch.manual_seed(0)
    module = make().eval()
    weights = weights_of(module)
    batch = Batch(data(samples), np.random.default_rng(1).integers(0, CLASSES, samples))
    together = how_many(k, bytes_each(module, cross_entropy, batch), SHARED_PASS)
    shapes = tuple(tuple(parameter.shape) for parameter in module.parameters())
    outer, signs = Directions(bytes(32), distribution_of(OUTER, shapes)), Directions(bytes(32), RADEMACHER)
    runtimes = {count: TorchLoss(_copy(make, module), together=count) for count in (1, together)}
    losses = {count: runtime.on(batch) for count, runtime in runtimes.items()}
    supports = dense(len(weights), k)
    at_once = max(together, LEAST)
    plain = TorchLoss(_copy(make, module)).on(batch.take(np.tile(np.arange(samples), at_once)))
    ways: dict[str, tuple[Callable[[], object], int]] = {
        "alone": (partial(forward_difference, losses[1], weights, signs, supports, SIGMA), k),
        "together": (partial(forward_difference, losses[together], weights, outer, supports, SIGMA), k),
        "in_one_batch": (partial(plain, weights), at_once),
    }
    least = {way: cpu_seconds(work) / count for way, (work, count) in ways.items()}
    for _ in range(turns):
        for way, (work, count) in ways.items():
            least[way] = min(least[way], cpu_seconds(work) / count)
    one, many = (
        forward_difference(loss, weights, outer, supports[:8], SIGMA).scalars for loss in (losses[1], losses[together])
    )
    return {
        "model": name,
        "weights": len(weights),
        "samples": samples,
        "together": together,
        "alone_ms": round(1000 * least["alone"], 4),
        "together_ms": round(1000 * least["together"], 4),
        "times": round(least["alone"] / least["together"], 2),
        "times_in_one_batch": round(least["alone"] / least["in_one_batch"], 2),
        "auto": automatic(runtimes, k, shapes, weights, batch),
        "losses_apart": float(np.max(np.abs(one - many))) * SIGMA,
    }


def automatic(
    runtimes: Mapping[int, TorchLoss], k: int, shapes: tuple[tuple[int, ...], ...], weights: F32, batch: Batch
) -> str:
    """What `probe.supports = "auto"` chooses."""
    plan = load("digits", [f"probe.k={k}", "probe.distribution=rademacher", "ring.n_max=1000"])
    together, prices = max(runtimes), dict[str, Price]()
    for kind, count, outer in (("dense", 1, {}), (OUTER, together, {"distribution": OUTER, "shapes": shapes})):
        probe = msgspec.structs.replace(plan.probe, **outer, together=together if outer else 0)
        settled = msgspec.structs.replace(plan, probe=probe)
        prices[kind] = Price(seconds_of_scalar(settled, runtimes[count], weights, batch, Stopwatch()), outer)
    return quickest_kind(prices)


def _copy(make: Callable[[], nn.Module], module: nn.Module) -> nn.Module:
    copy = make()
    copy.load_state_dict(module.state_dict())
    return copy


LINE = (
    "{model:42} {samples:3} samples: {alone_ms:8.3f} ms alone, {together_ms:8.3f} with {together} together: "
    "{times:.1f}×, in one batch {times_in_one_batch:.1f}×; auto chooses {auto}"
)


def main(description: str, measure: Callable[[str, int, int, int], dict[str, Any]], line: str) -> None:
    """Print a row for each model and number of samples, each as a line or all as JSON."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--k", type=int, default=64)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--samples", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = []
    with one_thread_each():
        for name in MODELS:
            for samples in arguments.samples:
                rows.append(measure(name, samples, arguments.k, arguments.turns))
                if not arguments.json:
                    print(line.format(**rows[-1]), flush=True)
    if arguments.json:
        about = {"k": arguments.k, "turns": arguments.turns, "load": round(os.getloadavg()[0], 2)}
        print(json.dumps({**about, "rows": rows}, indent=1))


if __name__ == "__main__":
    main(str(__doc__), measured, LINE)
