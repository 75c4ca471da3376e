"""Our bytes in Flower's records, and the name of the action under which they are sent."""

from flwr.app import ConfigRecord, Message, RecordDict

from baffle.flower.wire import KEY, RECORD


def action(tag: str) -> str:
    """Each type of message is an action of its own, so that Flower's records show how far a round is."""
    named = tag.replace("-", "_")
    return named if named.isidentifier() else "message"


def to_record(content: bytes) -> RecordDict:
    return RecordDict({RECORD: ConfigRecord({KEY: content})})


def content_of(reply: Message) -> bytes | None:
    record = reply.content.get(RECORD)
    content = record.get(KEY) if isinstance(record, ConfigRecord) else None
    return content if isinstance(content, bytes) else None
