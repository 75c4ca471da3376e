"""Optimizers: close to PyTorch's, in float32 throughout, and pure."""

import math
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest
import torch

from baffle.core.arrays import F32, F64
from baffle.core.update import (
    WEIGHTS_AT_ONCE,
    State,
    Transform,
    adam,
    average,
    clip,
    compose,
    momentum,
    no_average,
    sgd,
    weight_decay,
)

STEPS = 60
EVERY: dict[str, Transform] = {
    "adam": adam(0.01),
    "average": average(0.995),
    "clip": clip(0.3),
    "momentum": momentum(0.01),
    "no_average": no_average(),
    "sgd": sgd(0.01),
    "weight_decay": weight_decay(0.1),
    "chain": compose(clip(0.3), weight_decay(0.1), momentum(0.01), adam(0.01)),
}


def gradients(n: int = 20, steps: int = STEPS) -> Iterator[F32]:
    """Of very different sizes, with exact zeros among them."""
    generator = np.random.default_rng(7)
    sizes = 10.0 ** np.linspace(-6, 2, n)
    for _ in range(steps):
        gradient = (generator.normal(size=n) * sizes).astype(np.float32)
        gradient[0] = 0
        yield gradient


def start(n: int = 20) -> F32:
    return np.linspace(-1, 2, n, dtype=np.float32)


def frozen(vectors: State) -> State:
    for vector in vectors:
        vector.flags.writeable = False
    return vectors


def train(transform: Transform, steps: int = STEPS) -> F32:
    weights = start()
    state = transform.init(weights)
    for gradient in gradients(steps=steps):
        state, step = transform.update(state, gradient, weights)
        weights = weights + step
    return weights


def train_torch(make: Callable[[list[torch.Tensor]], torch.optim.Optimizer]) -> F32:
    weights = torch.from_numpy(start()).clone().requires_grad_()
    optimizer = make([weights])
    for gradient in gradients():
        weights.grad = torch.from_numpy(gradient)
        optimizer.step()
    trained: F32 = weights.detach().numpy()
    return trained


SGD = partial(torch.optim.SGD, lr=0.03)


@pytest.mark.parametrize(
    ("ours", "theirs", "atol"),
    [
        (adam(0.01), partial(torch.optim.Adam, lr=0.01, betas=(0.9, 0.99), eps=1e-8), 2e-5),
        (adam(0.1, 0.5, 0.999, 1e-3), partial(torch.optim.Adam, lr=0.1, betas=(0.5, 0.999), eps=1e-3), 2e-4),
        (sgd(0.03), SGD, 1e-6),
        *((momentum(0.03, beta), partial(SGD, momentum=beta), 1e-6) for beta in (0.0, 0.5, 0.9)),
        (compose(weight_decay(0.1), momentum(0.03)), partial(SGD, weight_decay=0.1, momentum=0.9), 1e-6),
    ],
)
def test_optimizers_are_pytorchs(ours: Transform, theirs: Callable[..., torch.optim.Optimizer], atol: float) -> None:
    assert train(ours) == pytest.approx(train_torch(theirs), rel=1e-5, abs=atol)


def test_clip_rescales_the_whole_gradient_and_keeps_its_direction() -> None:
    gradient = np.array([0.6, -1.5, 0.01, 0], np.float32)
    _, clipped = clip(0.3).update((), gradient, gradient)
    assert np.abs(clipped).max() == pytest.approx(0.3)
    assert clipped == pytest.approx(gradient / 5)


@pytest.mark.parametrize("gradient", [[0.29, -0.3, 0.0], [0.0, 0.0], [1e-45], []])
def test_clip_leaves_a_small_gradient_alone(gradient: list[float]) -> None:
    values = np.array(gradient, np.float32)
    assert clip(0.3).update((), values, values)[1].tobytes() == values.tobytes()


def test_a_chain_gives_every_part_its_own_state() -> None:
    together = compose(clip(0.3), momentum(-1.0), compose(adam(-1.0), momentum(-1.0)), sgd(0.01))
    weights = start()
    state = together.init(weights)
    assert [len(part) for part in state] == [20, 20, 20, 1, 1, 20]
    first, second, third = momentum(-1.0), adam(-1.0), momentum(-1.0)
    one, two, three = first.init(weights), second.init(weights), third.init(weights)
    for gradient in gradients(steps=5):
        state, step = together.update(state, gradient, weights)
        _, expected = clip(0.3).update((), gradient, weights)
        one, expected = first.update(one, expected, weights)
        two, expected = second.update(two, expected, weights)
        three, expected = third.update(three, expected, weights)
        assert step.tobytes() == sgd(0.01).update((), expected, weights)[1].tobytes()
        assert [part.tobytes() for part in state] == [part.tobytes() for part in (*one, *two, *three)]


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.995])
def test_the_average_warms_up_by_its_formula(decay: float) -> None:
    transform, weights = average(decay), start()
    state = transform.init(weights)
    expected: F64 = weights.astype(np.float64)
    for t, gradient in enumerate(gradients()):
        weights = (weights + 0.01 * np.tanh(gradient)).astype(np.float32)
        state, smooth = transform.update(state, gradient, weights)
        d = min(decay, (1 + t) / (10 + t))
        expected = d * expected + (1 - d) * weights
        assert smooth is state[0]
        assert smooth == pytest.approx(expected, abs=1e-5)
    assert state[1].tolist() == [STEPS]


@pytest.mark.parametrize("transform", EVERY.values(), ids=EVERY)
def test_everything_is_float32_and_nothing_given_is_changed(transform: Transform) -> None:
    (weights,) = frozen((start(),))
    state = frozen(transform.init(weights.copy()))
    lengths = [len(part) for part in state]
    for gradient in gradients(steps=4):
        frozen((gradient,))
        state, step = transform.update(state, gradient, weights)
        frozen(state)
        assert {part.dtype for part in (*state, step)} == {np.dtype(np.float32)}
        assert [len(part) for part in state] == lengths
        assert step.shape == weights.shape
        assert all(math.isfinite(number) for number in step.tolist())


@pytest.mark.parametrize("name", [name for name in EVERY if name not in ("clip", "chain")])
def test_many_weights_are_updated_as_each_would_be_alone(name: str) -> None:
    transform, n = EVERY[name], 2 * WEIGHTS_AT_ONCE + 5
    weights, whole, some = start(n), transform.init(start(n)), slice(WEIGHTS_AT_ONCE - 3, WEIGHTS_AT_ONCE + 3)
    alone = transform.init(weights[some])
    for gradient in gradients(n, steps=3):
        whole, step = transform.update(frozen(whole), gradient, weights)
        alone, small = transform.update(alone, gradient[some], weights[some])
        assert step[some].tobytes() == small.tobytes()
    assert [len(part) for part in whole] == [len(part) for part in transform.init(weights)]
    for part, small in zip(whole, alone, strict=True):
        assert (part[some] if len(part) == n else part).tobytes() == small.tobytes()
