"""A plan's model on PyTorch: its initial weights."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from baffle.plan import Plan
from baffle.task.load import load_server_task


def test_the_initial_weights_are_the_same_in_every_thread(tiny: Callable[..., Plan]) -> None:
    """Clients of one process make them at the same time, and PyTorch's generator is shared by all threads."""
    task = load_server_task(tiny('task.model={name="lenet", channels=[8,16]}'), None, 10)
    expected = task.initial_weights().tobytes()
    with ThreadPoolExecutor(8) as pool:
        made = pool.map(lambda _: task.initial_weights().tobytes(), range(64))
        assert set(made) == {expected}
