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
from baffle.errors import AwayError, one_line
from baffle.flower.records import action, content_of, to_record
from baffle.flower.run import superlink_error
from baffle.flower.wire import KEY, RECORD

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.05, 0.5  # seconds between two pulls

_PULL_DEADLINE = ContextVar("pull_deadline", default=math.inf)
"""When we stop waiting for the rest of replies that have begun to arrive, as `time.monotonic` counts."""


class GridTransport:
    """Exchanges messages with nodes, by their numbers. `seconds` is the deadline of an exchange; SuperLink accepts no
    reply after it either. `tell` is called with each node that failed, and the reason."""

    def __init__(
        self,
        grid: Grid,
        seconds: float,
        tell: Callable[[int, str], None] = lambda _node, _why: None,
    ) -> None:
        self._grid = grid
        self._seconds = seconds
        self._tell = tell
        self._stale: set[str] = set()  # messages past their deadline; pulled once more, so that SuperLink forgets them

    def exchange(self, requests: Mapping[int, bytes]) -> Mapping[int, bytes]:
        begun = time.monotonic()
        message_ids = self._push(list(requests.items()), begun)
        waiting = dict(zip(message_ids, requests, strict=True))
        replies: dict[int, bytes] = {}
        while waiting and (spent := time.monotonic() - begun) < self._seconds:
            pulled = time.monotonic()
            for reply in self._pull(waiting.keys() | self._stale):
                message_id = reply.metadata.reply_to_message_id
                self._stale.discard(message_id)
                node = waiting.pop(message_id, None)
                if node is None:
                    continue
                content = self._read(node, reply)
                if content is not None:
                    replies[node] = content
            if waiting:
                time.sleep(min(_LONGEST_PAUSE, max(_SHORTEST_PAUSE, spent / 10, time.monotonic() - pulled)))
        self._stale |= waiting.keys()
        return {node: replies[node] for node in requests if node in replies}

    def _read(self, node: int, reply: Message) -> bytes | None:
        """A reply's content; None, with the reason passed to `tell`, if it has none."""
        if reply.has_error():
            self._tell(node, one_line(reply.error.reason or "") or f"error {reply.error.code}")
            return None
        content = content_of(reply)
        if content is None:
            self._tell(node, f"expected a record {RECORD!r} with {KEY!r} as bytes, got another reply")
        return content

    def _push(self, contents: list[tuple[int, bytes]], begun: float) -> list[str]:
        """Send each content to its node; returns the ids of the messages. Waits for a SuperLink that is away."""
        while contents:
            left = self._seconds - (time.monotonic() - begun)
            messages = [
                Message(to_record(content), node, f"train.{action(tag_of(content))}", ttl=max(left, _LONGEST_PAUSE))
                for node, content in contents
            ]
            try:
                return list(self._grid.push_messages(messages))
            except ObjectPushError:  # a client confirmed its message before all of it was there
                return [message.metadata.message_id for message in messages]
            except httpx.HTTPError as fault:
                error = superlink_error("SuperLink", fault)
                if not isinstance(error, AwayError) or left <= _LONGEST_PAUSE:
                    raise error from fault
                self._stale |= {message.metadata.message_id for message in messages}
                time.sleep(_LONGEST_PAUSE)
        return []

    def _pull(self, message_ids: set[str]) -> Iterable[Message]:
        _PULL_DEADLINE.set(time.monotonic() + self._seconds / 4)
        try:
            return self._grid.pull_messages(message_ids)
        except httpx.HTTPStatusError as fault:
            raise superlink_error("SuperLink", fault) from fault
        except httpx.HTTPError:
            return []  # SuperLink is away for now; the exchange goes on until its deadline


def _pull_in_time(object_ids: list[str], pull_object_fn: Callable[[str], bytes]) -> dict[str, bytes]:
    """Flower's own function with a shorter deadline. For a reply that was announced but never sent, because its sender
    was killed or lies, Flower waits three minutes, and all other replies wait with it."""
    left = max(_LONGEST_PAUSE, _PULL_DEADLINE.get() - time.monotonic())
    return pull_objects(
        object_ids,
        pull_object_fn,
        max_time=left,
        initial_backoff=_SHORTEST_PAUSE,
        backoff_cap=min(left, _LONGEST_PAUSE),
    )


vars(http_grid)["pull_objects"] = _pull_in_time
