"""Puts our bytes into Flower's records and takes them out, and names the action under which they are sent."""

from flwr.app import ConfigRecord, Message, RecordDict

from baffle.flower.wire import KEY, RECORD


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
