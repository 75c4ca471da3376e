"""Optimizers: close to the textbook and to PyTorch's, in float32 throughout, and pure."""

import math
from collections.abc import Callable, Iterator

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


def textbook_adam(rate: float, beta1: float, beta2: float, epsilon: float) -> F64:
    """Kingma and Ba, algorithm 1, in float64."""
    weights = start().astype(np.float64)
    m, v = np.zeros_like(weights), np.zeros_like(weights)
    for t, gradient in enumerate(gradients(), 1):
        g = gradient.astype(np.float64)
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        weights = weights - rate * (m / (1 - beta1**t)) / (np.sqrt(v / (1 - beta2**t)) + epsilon)
    return weights


@pytest.mark.parametrize(
    ("rate", "beta1", "beta2", "epsilon"), [(0.01, 0.9, 0.99, 1e-8), (0.1, 0.5, 0.999, 1e-3), (0.01, 0.0, 0.9, 1e-8)]
)
def test_adam_is_the_textbooks(rate: float, beta1: float, beta2: float, epsilon: float) -> None:
    trained = train(adam(rate, beta1, beta2, epsilon))
    assert trained == pytest.approx(textbook_adam(rate, beta1, beta2, epsilon), abs=3e-5 * rate * STEPS, rel=1e-6)


def test_adam_is_pytorchs() -> None:
    expected = train_torch(lambda w: torch.optim.Adam(w, lr=0.01, betas=(0.9, 0.99), eps=1e-8))
    assert train(adam(0.01)) == pytest.approx(expected, abs=2e-5)


def test_adams_first_step_is_the_rate_whatever_the_gradients_size() -> None:
    gradient = np.array([1e-4, -3.0, 1e4, 0], np.float32)
    transform, weights = adam(0.25), np.zeros(4, np.float32)
    _, step = transform.update(transform.init(weights), gradient, weights)
    assert step == pytest.approx([-0.25, 0.25, -0.25, 0], rel=2e-4)


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9])
def test_momentum_is_pytorchs(beta: float) -> None:
    expected = train_torch(lambda w: torch.optim.SGD(w, lr=0.01, momentum=beta))
    assert train(momentum(0.01, beta)) == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_sgd_is_pytorchs() -> None:
    assert train(sgd(0.03)) == pytest.approx(train_torch(lambda w: torch.optim.SGD(w, lr=0.03)), rel=1e-5, abs=1e-6)


def test_weight_decay_is_pytorchs() -> None:
    expected = train_torch(lambda w: torch.optim.SGD(w, lr=0.03, weight_decay=0.1, momentum=0.9))
    assert train(compose(weight_decay(0.1), momentum(0.03))) == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_weight_decay_adds_a_share_of_the_weights() -> None:
    gradient, weights = np.array([1, 2], np.float32), np.array([4, -8], np.float32)
    assert weight_decay(0.25).update((), gradient, weights)[1].tolist() == [2, 0]


def test_clip_rescales_the_whole_gradient_and_keeps_its_direction() -> None:
    gradient = np.array([0.6, -1.5, 0.01, 0], np.float32)
    _, clipped = clip(0.3).update((), gradient, gradient)
    assert np.abs(clipped).max() == pytest.approx(0.3)
    assert clipped == pytest.approx(gradient / 5)


@pytest.mark.parametrize("gradient", [[0.29, -0.3, 0.0], [0.0, 0.0], [1e-45], []])
def test_clip_leaves_a_small_gradient_alone(gradient: list[float]) -> None:
    values = np.array(gradient, np.float32)
    assert clip(0.3).update((), values, values)[1].tobytes() == values.tobytes()


def test_a_chain_applies_its_parts_in_order() -> None:
    gradient, weights = np.array([10.0, -5.0], np.float32), np.array([1.0, 1.0], np.float32)
    _, clipped_first = compose(clip(1.0), weight_decay(1.0), sgd(1.0)).update((), gradient, weights)
    _, decayed_first = compose(weight_decay(1.0), clip(1.0), sgd(1.0)).update((), gradient, weights)
    assert clipped_first == pytest.approx([-2.0, -0.5])
    assert decayed_first == pytest.approx([-1.0, 4 / 11])


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


def test_an_empty_chain_changes_nothing() -> None:
    gradient = np.ones(3, np.float32)
    assert compose().init(gradient) == ()
    assert compose().update((), gradient, gradient) == ((), gradient)


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


def test_the_average_reaches_its_full_decay() -> None:
    late = np.array([5000], np.float32)
    _, smooth = average(0.995).update((np.ones(1, np.float32), late), np.zeros(1, np.float32), np.zeros(1, np.float32))
    assert smooth == pytest.approx([0.995])


def test_the_average_starts_as_a_copy_of_the_weights() -> None:
    weights = start()
    smooth, steps = average(0.9).init(weights)
    assert smooth.tobytes() == weights.tobytes()
    assert not np.shares_memory(smooth, weights)
    assert steps.tolist() == [0]


def test_no_average_keeps_nothing_and_gives_the_weights() -> None:
    weights = start()
    assert no_average().init(weights) == ()
    state, smooth = no_average().update((), np.zeros(20, np.float32), weights)
    assert state == ()
    assert smooth is weights


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


@pytest.mark.parametrize("transform", EVERY.values(), ids=EVERY)
def test_the_same_input_gives_the_same_output(transform: Transform) -> None:
    def run() -> list[bytes]:
        weights, seen = start(), list[bytes]()
        state = transform.init(weights)
        for gradient in gradients(steps=4):
            state, step = transform.update(state, gradient, weights)
            seen += [step.tobytes(), *(part.tobytes() for part in state)]
        return seen

    assert run() == run()
