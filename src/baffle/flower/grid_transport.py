"""Messages to the nodes of a run and their replies, over Flower's grid."""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar

import httpx
from flwr.app import Message
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError, pull_objects
from flwr.superlink.grid import http_grid

from baffle.core.messages import tag_of
from baffle.errors import AwayError
from baffle.flower.records import action, content_of, to_record
from baffle.flower.run import AppRun, FlowerRun, superlink_error
from baffle.flower.wire import KEY, RECORD

_SHORTEST, _LONGEST = 0.05, 0.5  # seconds between two looks for replies

_PATIENCE = ContextVar("patience", default=math.inf)
"""Until when the rest of replies that have begun is waited for."""


class GridTransport:
    """A transport over a grid. `nodes` says which node each client is now; `seconds` is the deadline of an exchange,
    after which SuperLink takes no reply to it either. `tell` hears of clients that failed, and why."""

    def __init__(
        self,
        grid: Grid,
        nodes: Callable[[], Mapping[int, int]],
        seconds: float,
        tell: Callable[[int, str], None] = lambda _client, _why: None,
    ) -> None:
        self._grid, self._nodes, self._seconds, self._tell = grid, nodes, seconds, tell
        # Messages past their deadline: asked for once more, so that SuperLink forgets them.
        self._stale: set[str] = set()

    def exchange(self, requests: Mapping[int, bytes]) -> Mapping[int, bytes]:
        begun = time.monotonic()
        nodes = self._nodes()
        there = [client for client in requests if client in nodes]
        open_ = dict(zip(self._push([(nodes[c], requests[c]) for c in there], begun), there, strict=True))
        replies: dict[int, bytes] = {}
        while open_ and (spent := time.monotonic() - begun) < self._seconds:
            looked = time.monotonic()
            for reply in self._pull(open_.keys() | self._stale):
                asked = reply.metadata.reply_to_message_id
                self._stale.discard(asked)
                client = open_.pop(asked, None)
                if client is None:
                    continue
                if reply.has_error():
                    self._tell(client, reply.error.reason or f"error {reply.error.code}")
                elif (content := content_of(reply)) is None:
                    self._tell(client, f"expected a record {RECORD!r} with {KEY!r} as bytes, got another reply")
                else:
                    replies[client] = content
            if open_:
                time.sleep(min(_LONGEST, max(_SHORTEST, spent / 10, time.monotonic() - looked)))
        self._stale |= open_.keys()
        return {client: replies[client] for client in requests if client in replies}

    def _push(self, contents: list[tuple[int, bytes]], begun: float) -> list[str]:
        """Sends each content to its node; gives the messages' names. Waits for a SuperLink that is away."""
        while contents:
            left = self._seconds - (time.monotonic() - begun)
            messages = [
                Message(to_record(content), node, f"train.{action(tag_of(content))}", ttl=max(left, _LONGEST))
                for node, content in contents
            ]
            try:
                return list(self._grid.push_messages(messages))
            except ObjectPushError:  # a client took its message as received before all of it was there
                return [message.metadata.message_id for message in messages]
            except httpx.HTTPError as fault:
                told = superlink_error("SuperLink", fault)
                if not isinstance(told, AwayError) or left <= _LONGEST:
                    raise told from fault
                self._stale |= {message.metadata.message_id for message in messages}
                time.sleep(_LONGEST)
        return []

    def _pull(self, names: set[str]) -> Iterable[Message]:
        _PATIENCE.set(time.monotonic() + self._seconds / 4)
        try:
            return self._grid.pull_messages(names)
        except httpx.HTTPStatusError as fault:
            raise superlink_error("SuperLink", fault) from fault
        except httpx.HTTPError:
            return []  # away for now; the deadline ends this


def _pull_in_time(object_ids: list[str], pull_object_fn: Callable[[str], bytes]) -> dict[str, bytes]:
    """Flower's own, but for its patience: for a reply that was announced and whose sender was then killed, or lies, it
    waits three minutes, and all other replies wait with it."""
    left = max(_LONGEST, _PATIENCE.get() - time.monotonic())
    return pull_objects(
        object_ids, pull_object_fn, max_time=left, initial_backoff=_SHORTEST, backoff_cap=min(left, _LONGEST)
    )


vars(http_grid)["pull_objects"] = _pull_in_time


class FlowerNodes:
    """The nodes of a run, and messages to them."""

    def __init__(self, run: FlowerRun | AppRun, seconds: float, tell: Callable[[int, str], None]) -> None:
        self._run, self._here = run, dict[int, int]()
        self._transport = GridTransport(run.grid, lambda: self._here, seconds, tell)

    def present(self) -> set[int]:
        self._here = {node: node for node in self._run.nodes()}
        return set(self._here)

    def exchange(self, requests: Mapping[int, bytes]) -> Mapping[int, bytes]:
        return self._transport.exchange(requests)
