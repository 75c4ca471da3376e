"""What a fit says while it goes on: lines of text, or a bar in a notebook."""

import builtins
import sys
import time
from collections.abc import Callable
from html import escape
from typing import Any
from uuid import uuid4

from baffle.report.words import duration, is_share
from baffle.server.recorder import Progress, Watch

LATEST = 10.0  # the most seconds between two lines of progress
OFTEN = 0.5  # the least seconds between two looks of a bar


def shown_progress() -> Watch:
    shell: Any = getattr(builtins, "get_ipython", lambda: None)()
    return progress_bar(shell.display_pub) if hasattr(shell, "kernel") else progress_lines()


def progress_lines(clock: Callable[[], float] = time.monotonic) -> Watch:
    """Writes a line whenever the model has been evaluated to another value, and at least every few seconds."""
    last, said = "", clock()

    def watch(now: Progress) -> None:
        nonlocal last, said
        value = _value(now)
        is_news = now.rounds_done == int(now.rounds_done) and value and (value != last or now.rounds_done == now.rounds)
        if not is_news and clock() - said < LATEST:
            return
        last, said = value, clock()
        sys.stdout.write(f"{_words(now)}\n")
        sys.stdout.flush()

    return watch


def progress_bar(publisher: Any, clock: Callable[[], float] = time.monotonic) -> Watch:
    """Draws a bar under a notebook's cell, and draws it again as the run goes on. `publisher` is that of IPython."""
    transient, drawn = {"display_id": uuid4().hex}, float("-inf")

    def watch(now: Progress) -> None:
        nonlocal drawn
        if clock() - drawn < OFTEN and now.rounds_done != now.rounds:
            return
        words = _words(now)
        bar = f'<progress max="{now.rounds}" value="{now.rounds_done:.2f}" style="width: 20em"></progress>'
        data = {"text/plain": words, "text/html": f"{bar} <code>{escape(words)}</code>"}
        publisher.publish(data, transient=transient, update=drawn > float("-inf"))
        drawn = clock()

    return watch


def _value(now: Progress) -> str:
    return "" if now.value is None else f"{now.value:.1%}" if is_share(now.metric) else f"{now.value:.4g}"


def _words(now: Progress) -> str:
    value, whole = _value(now), now.rounds_done == int(now.rounds_done)
    loss = "loss –" if now.loss is None else f"loss {now.loss:.4g}"
    course = loss if now.epsilon is None else f"ε {now.epsilon:.3g}"
    done = f"{now.rounds_done:4.0f}" if whole else f"{now.rounds_done:4.1f}"
    measured = f"  test {now.metric} {value}" if value else ""
    left = f"  {duration(now.seconds_left)} left" if now.seconds_left else ""
    return f"round {done}/{now.rounds}  {course}{measured}{left}"
