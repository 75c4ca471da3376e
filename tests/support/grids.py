"""Flower's grid without a network."""

from collections.abc import Callable, Iterable
from typing import Any
from uuid import uuid4

from flwr.app import Message
from flwr.serverapp import Grid

from baffle.flower.grid_transport import content_of, to_record

Answer = Callable[[Message], Message | None]  # a node: message → reply, or None if it never replies


class Nodes(Grid):
    """Nodes in this process, by arbitrary numbers. `faults` are raised by the next calls, one each."""

    def __init__(self, answers: dict[int, Answer] | None = None) -> None:
        self.answers = {} if answers is None else answers
        self.faults: list[Exception] = []
        self.pulled: list[set[str]] = []
        self.replies: dict[str, Message] = {}

    def get_node_ids(self) -> Iterable[int]:
        self._fail()
        return list(self.answers)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        names = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = name = str(uuid4())
            names.append(name)
        self._fail()
        for message in messages:
            reply = self.answers[message.metadata.dst_node_id](message)
            if reply is not None:
                self.replies[message.metadata.message_id] = reply
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        self._fail()
        self.pulled.append(set(message_ids))
        return [self.replies.pop(name) for name in message_ids if name in self.replies]

    def _fail(self) -> None:
        if self.faults:
            raise self.faults.pop(0)

    def _unused(self, *_arguments: Any, **_options: Any) -> Any:
        raise NotImplementedError

    set_run = create_message = send_and_receive = _unused
    run = property(_unused)


def node(answer: Callable[[bytes], bytes]) -> Answer:
    """A node that answers our bytes with ours."""

    def reply(message: Message) -> Message:
        content = content_of(message)
        assert content is not None
        return Message(to_record(answer(content)), reply_to=message)

    return reply
