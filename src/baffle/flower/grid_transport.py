"""Messages to the nodes of a run and their replies, over Flower's grid: our bytes in Flower's records."""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar

import httpx
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError, pull_objects
from flwr.superlink.grid import http_grid

from baffle.core.messages import tag_of
from baffle.errors import AwayError, TransportError, one_line
from baffle.network.clock import Clock

RECORD, KEY = "baffle", "message"  # the record of a message, and the key in it, that hold our bytes
NOT_OURS = f"expected a record {RECORD!r} with {KEY!r} as bytes, got another message"
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.05, 0.5  # seconds between two pulls

_PULL_DEADLINE = ContextVar("pull_deadline", default=math.inf)
"""When we stop waiting for the rest of replies that have begun to arrive, as `time.monotonic` counts."""


def action(tag: str) -> str:
    """The action for a message's tag. Each type of message has its own, so Flower's log shows a round's progress."""
    name = tag.replace("-", "_")
    return name if name.isidentifier() else "message"


def to_record(content: bytes) -> RecordDict:
    return RecordDict({RECORD: ConfigRecord({KEY: content})})


def content_of(message: Message) -> bytes | None:
    """Our bytes in a message; None if there are none."""
    record = message.content.get(RECORD)
    content = record.get(KEY) if isinstance(record, ConfigRecord) else None
    return content if isinstance(content, bytes) else None


class GridTransport:
    """Exchanges messages with nodes, by their numbers."""

    def __init__(self, grid: Grid, clock: Clock | None = None) -> None:
        self._grid = grid
        self.clock = clock or Clock()
        self._stale: set[str] = set()  # messages past their deadline; pulled once more, so that SuperLink forgets them

    def nodes(self) -> set[int]:
        """The nodes that are online."""
        try:
            return set(self._grid.get_node_ids())
        except httpx.HTTPError as fault:
            raise _superlink_error(fault) from fault

    def exchange(
        self, requests: Mapping[int, bytes], seconds: float, tell: Callable[[int, str], None]
    ) -> Mapping[int, bytes]:
        """The nodes' replies that arrive within this many seconds; SuperLink accepts no later ones either. `tell` is
        called with each node that failed, and the reason."""
        begun = self.clock.now()
        message_ids = self._push(list(requests.items()), begun + seconds)
        waiting = dict(zip(message_ids, requests, strict=True))
        replies: dict[int, bytes] = {}
        while waiting and (spent := self.clock.now() - begun) < seconds:
            pulled = self.clock.now()
            for reply in self._pull(waiting.keys() | self._stale, seconds / 4):
                message_id = reply.metadata.reply_to_message_id
                self._stale.discard(message_id)
                node = waiting.pop(message_id, None)
                if node is None:
                    continue
                if reply.has_error():
                    tell(node, one_line(reply.error.reason or "") or f"error {reply.error.code}")
                elif (content := content_of(reply)) is None:
                    tell(node, NOT_OURS)
                else:
                    replies[node] = content
            if waiting:
                self.clock.sleep(min(_LONGEST_PAUSE, max(_SHORTEST_PAUSE, spent / 10, self.clock.now() - pulled)))
        self._stale |= waiting.keys()
        return {node: replies[node] for node in requests if node in replies}

    def _push(self, contents: list[tuple[int, bytes]], until: float) -> list[str]:
        """Send each content to its node; returns the ids of the messages. Waits for a SuperLink that is away."""
        while contents:
            left = until - self.clock.now()
            messages = [
                Message(to_record(content), node, f"train.{action(tag_of(content))}", ttl=max(left, _LONGEST_PAUSE))
                for node, content in contents
            ]
            try:
                return list(self._grid.push_messages(messages))
            except ObjectPushError:  # a client confirmed its message before all of it was there
                return [message.metadata.message_id for message in messages]
            except httpx.HTTPError as fault:
                error = _superlink_error(fault)
                if not isinstance(error, AwayError) or left <= _LONGEST_PAUSE:
                    raise error from fault
                self._stale |= {message.metadata.message_id for message in messages}
                self.clock.sleep(_LONGEST_PAUSE)
        return []

    def _pull(self, message_ids: set[str], seconds: float) -> Iterable[Message]:
        """The replies that have arrived. A reply that has arrived in part has this many seconds to complete."""
        _PULL_DEADLINE.set(time.monotonic() + seconds)
        try:
            return self._grid.pull_messages(message_ids)
        except httpx.HTTPStatusError as fault:
            raise _superlink_error(fault) from fault
        except httpx.HTTPError:
            return []  # SuperLink is away for now; the exchange goes on until its deadline


def _superlink_error(fault: httpx.HTTPError) -> TransportError:
    """Our error for a call that failed: SuperLink does not know the run, or it is away."""
    if isinstance(fault, httpx.HTTPStatusError) and fault.response.status_code < 500:
        return TransportError(f"SuperLink no longer knows this run: start another ({fault.response.text})")
    return AwayError(f"SuperLink cannot be reached ({fault})")


def _pull_in_time(object_ids: list[str], pull_object_fn: Callable[[str], bytes]) -> dict[str, bytes]:
    """Flower's own function with a shorter deadline. For a reply that was announced but never sent, because its sender
    was killed or lies, Flower waits three minutes, and all other replies wait with it."""
    left = max(_LONGEST_PAUSE, _PULL_DEADLINE.get() - time.monotonic())
    cap = min(left, _LONGEST_PAUSE)
    return pull_objects(object_ids, pull_object_fn, max_time=left, initial_backoff=_SHORTEST_PAUSE, backoff_cap=cap)


vars(http_grid)["pull_objects"] = _pull_in_time
