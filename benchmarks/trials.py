"""Ideas of others that might make K scalars tell more, tried on estimates that are drawn from their law.

    python benchmarks/trials.py           # about three minutes of CPU time
    python benchmarks/trials.py --json    # ... and write results/trials.json; rows that are in it are not run again

The nets, batches and rounds are those of any_net.py. The last layer is exact, and the estimate for all other weights is
drawn from the law of K gaussian directions (`baffle.core.law`), around the gradient of backpropagation. Each way has
the same rates, tried with two seeds on held-out training samples; the one with the best mean accuracy there is run with
five other seeds, and the accuracy on test samples is reported, that of the averaged weights. The alignment is the
cosine of an estimate and its gradient without the last layer, the mean over all rounds.

- Spectral step: where Adam would step with momentum, each matrix steps with the momentum whose singular values are all
  1, scaled to a root mean square of 0.2. ZO-Muon does so within a subspace: directions for a matrix of m rows lie in
  m / 4 random dimensions, others every fifty rounds.
- Preconditioned directions (HiSo): a weight is moved in proportion to the root of Adam's step for a gradient of 1, by
  the second moments of estimates, or of exact gradients, which no federation knows: the best that could be hoped for.
- Second moment from the first (R-AdaZO): Adam's second moments are those of its mean, not of the estimates.
- Span of public inputs: a row of a matrix is moved along the inputs of its layer that are behind 95 % of the squares on
  64 public samples, found again every 25 rounds. They are training samples here, whose labels are not used.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import sqrt
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from any_net import ROUNDS, plan_of
from layer_shares import WAYS as SHARES, lay_out
from torch import Tensor, nn

from baffle.core.arrays import F32, F64
from baffle.core.directions import GAUSSIAN, Directions, Support
from baffle.core.law import draw
from baffle.core.update import FLOOR, adam, average
from baffle.runtime.torch.head import linear_layers
from baffle.runtime.torch.loss import TorchLoss
from baffle.task.load import Task, load_task
from baffle.task.metrics import evaluate

FILE = Path(__file__).parents[1] / "results" / "trials.json"
NETS = ("six layers", "transformer")
RATES = (0.001, 0.0025, 0.006, 0.015, 0.04)
CHOOSING, SEEDS = (100, 101), (0, 1, 2, 3, 4)
BETAS, EPSILON = (0.9, 0.99), 1e-8
PUBLIC, ENERGY, FRESH_SPAN, FRESH_SUBSPACE = 64, 0.95, 25, 50

Matrices = dict[int, F64]  # where a matrix begins → a basis of columns


@dataclass
class Net:
    """A net at its present weights, and a source of estimates."""

    task: Task
    runtime: TorchLoss
    module: nn.Module
    random: np.random.Generator
    weights: F32

    @cached_property
    def head(self) -> int:
        """Where the last layer begins."""
        return max(place.support.start for place in linear_layers(self.module))

    @cached_property
    def matrices(self) -> dict[int, tuple[int, int]]:
        """Where each matrix before the last layer begins, and its shape. A convolution has a row for each channel."""
        found, start = dict[int, tuple[int, int]](), 0
        for parameter in self.module.parameters():
            if parameter.ndim > 1 and start < self.head:
                found[start] = len(parameter), parameter[0].numel()
            start += parameter.numel()
        return found

    def drawn(self, exact: F64, supports: Sequence[Support] = ()) -> F64:
        """What K directions make of a gradient."""
        over = supports or [Support(0, len(exact))] * self.task.plan.probe.k
        return draw(exact.astype(np.float32), Directions(self.random.bytes(32), GAUSSIAN), over).astype(np.float64)

    def within(self, exact: F64, bases: Matrices, *, rows: bool) -> F64:
        """An estimate whose directions lie within a subspace: that of each matrix is spanned by a basis of its rows, or
        of its columns."""
        shapes, kept, parts = self.matrices, np.ones(len(exact), bool), list[F64]()
        for start, basis in bases.items():
            m, n = shapes[start]
            kept[start : start + m * n] = False
            matrix = exact[start : start + m * n].reshape(m, n)
            parts.append(matrix @ basis if rows else basis.T @ matrix)
        found = self.drawn(np.concatenate([exact[kept], *(part.reshape(-1) for part in parts)]))
        estimate, after = np.empty_like(exact), int(kept.sum())
        estimate[kept] = found[:after]
        for (start, basis), part in zip(bases.items(), parts, strict=True):
            m, n = shapes[start]
            own = found[after : after + part.size].reshape(part.shape)
            estimate[start : start + m * n] = (own @ basis.T if rows else basis @ own).reshape(-1)
            after += part.size
        return estimate

    def spans(self) -> Matrices:
        """For each matrix whose layer shows its inputs, the directions of inputs that matter."""
        names = {parameter.data_ptr(): start for parameter, start in zip(self.parameters, self.starts, strict=True)}
        squares = dict[int, Tensor]()

        def note(layer: nn.Module, given: tuple[Any, ...], _: Any) -> None:
            x, weight = given[0], layer.in_proj_weight if isinstance(layer, nn.MultiheadAttention) else layer.weight
            assert isinstance(weight, Tensor)
            if isinstance(layer, nn.Conv2d):
                x = nn.functional.unfold(x, layer.kernel_size, layer.dilation, (*layer.padding,), layer.stride)
                x = x.transpose(1, 2)
            rows = x.reshape(-1, x.shape[-1]).double()
            squares[names[weight.data_ptr()]] = rows.T @ rows

        layers = [m for m in self.module.modules() if isinstance(m, nn.Linear | nn.Conv2d | nn.MultiheadAttention)]
        hooks = [layer.register_forward_hook(note) for layer in layers]
        self.runtime.samples_on(self.task.source.train.batch(np.arange(PUBLIC)))(self.weights)
        for hook in hooks:
            hook.remove()
        return {start: _strongest(found.numpy()) for start, found in squares.items() if start in self.matrices}

    @cached_property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.module.parameters())

    @cached_property
    def starts(self) -> list[int]:
        return [0, *np.cumsum([parameter.numel() for parameter in self.parameters])[:-1].tolist()]

    def subspaces(self) -> Matrices:
        """A random subspace of a quarter of the rows, for each matrix."""
        return {
            start: np.linalg.qr(self.random.standard_normal((m, max(1, m // 4))))[0]
            for start, (m, _) in self.matrices.items()
        }


def _strongest(square: F64) -> F64:
    """The eigenvectors behind most of the trace."""
    values, vectors = np.linalg.eigh(square)
    share = np.cumsum(values[::-1]) / values.sum()
    return vectors[:, ::-1][:, : int(np.searchsorted(share, ENERGY)) + 1]


class Adam:
    """Adam on an estimate. Ways differ from it in what they override."""

    def __init__(self, net: Net, rate: float) -> None:
        self.net, self.rate = net, rate
        self.optimizer = adam(rate, *BETAS, EPSILON)
        self.state = self.optimizer.init(net.weights)

    def estimate(self, exact: F64, _: int) -> F64:
        """Of the weights before the last layer."""
        return self.net.drawn(exact)

    def step(self, gradient: F32) -> F32:
        self.state, move = self.optimizer.update(self.state, gradient, self.net.weights)
        return move


class Layers(Adam):
    supports: Sequence[Support] = ()

    def estimate(self, exact: F64, _: int) -> F64:
        if not self.supports:
            layers = [layer for layer in self.net.task.model.layers() or () if layer.start < self.net.head]
            shares, k = SHARES["one layer each, K_s ∝ √n_s"][1], self.net.task.plan.probe.k
            by_root = lay_out(layers, exact.astype(np.float32), k, 0.0, shares)
            self.supports = [support for support, count in by_root for _ in range(count)]
        return self.net.drawn(exact, self.supports)


class Spectral(Adam):
    def step(self, gradient: F32) -> F32:
        move = super().step(gradient).copy()
        for start, (m, n) in self.net.matrices.items():
            here = slice(start, start + m * n)
            u, _, v = np.linalg.svd(self.state[0][here].reshape(m, n), full_matrices=False)
            move[here] = (-self.rate * 0.2 * sqrt(max(m, n)) * (u @ v)).reshape(-1)
        return move


class ZoMuon(Spectral):
    def estimate(self, exact: F64, number: int) -> F64:
        if number % FRESH_SUBSPACE == 0:
            self.subspaces = self.net.subspaces()
        return self.net.within(exact, self.subspaces, rows=False)


class Preconditioned(Adam):
    """P⁻¹ times the estimate of P g, from directions that P scales."""

    def moments(self, exact: F64) -> F64:
        return self.state[1][: len(exact)].astype(np.float64)

    def estimate(self, exact: F64, _: int) -> F64:
        moments = self.moments(exact)
        scale = np.maximum(moments, FLOOR * moments.mean() or 1.0) ** -0.25
        scale /= scale.mean()
        return self.net.drawn(scale * exact) / scale


class KnownPreconditioner(Preconditioned):
    """Its steps have the same second moments as its directions."""

    exact_moments: F64 | None = None
    power = 1.0

    def moments(self, exact: F64) -> F64:
        before = np.zeros_like(exact) if self.exact_moments is None else self.exact_moments
        self.exact_moments, self.power = BETAS[1] * before + (1 - BETAS[1]) * exact**2, self.power * BETAS[1]
        return self.exact_moments

    def step(self, gradient: F32) -> F32:
        assert self.exact_moments is not None
        move = super().step(gradient).copy()
        mean, _, power1, _ = self.state
        rest = slice(0, self.net.head)
        moments = np.maximum(self.exact_moments, FLOOR * self.exact_moments.mean()) / (1 - self.power)
        move[rest] = -self.rate * mean[rest] / (1 - power1) / (np.sqrt(moments) + EPSILON)
        return move


class SecondFromFirst(Adam):
    def __init__(self, net: Net, rate: float) -> None:
        super().__init__(net, rate)
        self.mean, self.square, self.count = np.zeros_like(net.weights), np.zeros_like(net.weights), 0

    def step(self, gradient: F32) -> F32:
        (b1, b2), self.count = BETAS, self.count + 1
        self.mean = b1 * self.mean + (1 - b1) * gradient
        self.square = b2 * self.square + (1 - b2) * self.mean**2
        divisor = np.sqrt(self.square / (1 - b2**self.count)) + EPSILON
        move: F32 = (-self.rate * self.mean / (1 - b1**self.count) / divisor).astype(np.float32)
        return move


class Span(Adam):
    def estimate(self, exact: F64, number: int) -> F64:
        if number % FRESH_SPAN == 0:
            self.bases = self.net.spans()
        return self.net.within(exact, self.bases, rows=True)


WAYS: dict[str, Callable[[Net, float], Adam]] = {
    "dense, Adam": Adam,
    "one layer each, Adam": Layers,
    "spectral step": Spectral,
    "spectral step in a subspace": ZoMuon,
    "preconditioned directions": Preconditioned,
    "preconditioner known exactly": KnownPreconditioner,
    "second moment from the first": SecondFromFirst,
    "span of public inputs": Span,
}


def played(name: str, way: str, rate: float, seed: int, rounds: int, *, held_out: bool) -> dict[str, float]:
    """A run: the accuracy at its half and at its end, and the alignment."""
    task = load_task(plan_of(name, "dense", rate, seed, held_out=held_out, settings=("run.runtime=torch",)))
    runtime, plan, samples = task.runtime(), task.plan, task.source.train
    assert isinstance(runtime, TorchLoss)
    net = Net(task, runtime, runtime._module, np.random.default_rng(seed), task.initial_weights())
    mine, smooth = WAYS[way](net, rate), average(plan.update.ema)
    averaged, mean = smooth.init(net.weights), net.weights
    metrics, test = task.require_measurable(), task.source.test.batch(np.arange(len(task.source.test)))
    order, cosines, found = task.shares[0][:0], list[float](), dict[str, float]()
    for number in range(rounds):
        if len(order) < plan.federation.batch:
            order = net.random.permutation(task.shares[0])
        batch, order = samples.batch(order[: plan.federation.batch]), order[plan.federation.batch :]
        gradient = runtime.gradient_on(batch, None)(net.weights)[1]
        exact = gradient[: net.head].astype(np.float64)
        estimate = mine.estimate(exact, number)
        cosines.append(float(estimate @ exact / (np.linalg.norm(estimate) * np.linalg.norm(exact) + 1e-30)))
        move = mine.step(np.concatenate([estimate.astype(np.float32), gradient[net.head :]]))
        net.weights = net.weights + move
        averaged, mean = smooth.update(averaged, move, net.weights)
        if number + 1 in (rounds // 2, rounds):
            at = "accuracy" if number + 1 == rounds else "at_half"
            found[at] = round(evaluate(metrics, runtime, mean, test, task.source)["test_accuracy"], 4)
    return found | {"alignment": round(fmean(cosines), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="write results/trials.json")
    parser.add_argument("--out", type=Path, help="write there")
    parser.add_argument("--net", action="append", choices=NETS, help="only this one; may be repeated")
    parser.add_argument("--way", action="append", choices=WAYS, help="only this one; may be repeated")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    args = parser.parse_args()
    out = args.out or (FILE if args.json else None)
    rows: dict[str, Any] = json.loads(out.read_text()) if out and out.exists() else {}
    torch.set_num_threads(1)
    for net, way in product(args.net or NETS, args.way or WAYS):
        if (name := f"{net} | {way}") in rows:
            continue
        held_out = {
            f"{rate:g}": [played(net, way, rate, seed, args.rounds, held_out=True)["accuracy"] for seed in CHOOSING]
            for rate in RATES
        }
        rate = max(RATES, key=lambda rate: fmean(held_out[f"{rate:g}"]))
        runs = [played(net, way, rate, seed, args.rounds, held_out=False) for seed in SEEDS]
        rows[name] = {"rate": rate, "held_out": held_out, "runs": runs}
        each = " ".join(f"{run['accuracy']:.1%}" for run in runs)
        print(f"{name:45} {rate:6g} {fmean(run['accuracy'] for run in runs):.1%} ({each})", file=sys.stderr, flush=True)
        if out:
            out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
