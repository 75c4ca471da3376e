"""Flower's wire format, as far as a client needs it: protobuf messages, and contents as a tree of objects.

Numbers and types are those of Flower 1.41. The messages are in a separate descriptor pool, so that they never clash
with those of flwr, which this module does not need. Only fields that we read or write are named; others are ignored.

A message's content is not sent inside the message but as separate objects, each named by its SHA-256 hash and encoded
as `kind children length`, a zero byte, and a body:

    Message ─ RecordDict ─ ConfigRecord     one of each; BAFFLE's bytes are in record "baffle", key "message"
"""

import json
from hashlib import sha256
from typing import Any, cast

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from baffle.errors import MessageError

RECORD, KEY = "baffle", "message"

Wire = Any
"""A protobuf message. Its class is made at run time, so type checkers do not know its fields."""

_FIELDS = {
    "Node": "1 node_id uint64",
    "Error": "1 code sint64, 2 reason string",
    "Value": "6 bytes bytes",
    "Item": "1 key string, 2 value Value",
    "ConfigRecord": "1 items Item*",
    "RecordDict": "",
    "Metadata": "1 run_id uint64, 2 message_id string, 3 src_node_id uint64, 4 dst_node_id uint64, "
    "5 reply_to_message_id string, 6 group_id string, 7 ttl double, 8 message_type string, 9 created_at double",
    "Message": "1 metadata Metadata, 2 content RecordDict, 3 error Error",
    "ObjectTree": "1 object_id string, 2 children ObjectTree*",
    "RegisterNodeRequest": "1 public_key bytes",
    "RegisterNodeResponse": "1 node_id uint64",
    "ActivateNodeRequest": "1 public_key bytes, 2 heartbeat_interval double",
    "ActivateNodeResponse": "1 node_id uint64",
    "DeactivateNodeRequest": "1 node_id uint64",
    "DeactivateNodeResponse": "",
    "UnregisterNodeRequest": "1 node_id uint64",
    "UnregisterNodeResponse": "",
    "SendNodeHeartbeatRequest": "1 node Node, 2 heartbeat_interval double",
    "SendNodeHeartbeatResponse": "1 success bool",
    "PullMessagesRequest": "1 node Node",
    "PullMessagesResponse": "2 messages_list Message*, 3 message_object_trees ObjectTree*",
    "PushMessagesRequest": "1 node Node, 2 messages_list Message*, 3 message_object_trees ObjectTree*",
    "PushMessagesResponse": "3 objects_to_push string*, 4 session_id string",
    "PullObjectRequest": "1 node Node, 2 run_id uint64, 3 object_id string",
    "PullObjectResponse": "1 object_found bool, 2 object_available bool, 3 object_content bytes",
    "PushObjectRequest": "1 node Node, 2 run_id uint64, 3 object_id string, 4 object_content bytes, "
    "5 session_id string",
    "PushObjectResponse": "1 stored bool",
    "ConfirmMessageReceivedRequest": "1 node Node, 2 run_id uint64, 3 message_object_id string",
    "ConfirmMessageReceivedResponse": "",
}
"""Message → number, name and type of its fields; a star marks a repeated field."""


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="fleet.proto", package="fleet", syntax="proto3")
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        for field in filter(None, fields.split(", ")):
            number, label, kind = field.split()
            added = message.field.add(name=label, number=int(number))
            added.label = added.LABEL_REPEATED if kind.endswith("*") else added.LABEL_OPTIONAL
            kind = kind.rstrip("*")
            if kind in _FIELDS:
                added.type, added.type_name = added.TYPE_MESSAGE, f".fleet.{kind}"
            else:
                added.type = getattr(added, f"TYPE_{kind.upper()}")
    # In Flower a value is a oneof of several kinds. Without it, empty bytes could not be told from no value.
    value = next(message for message in file.message_type if message.name == "Value")
    value.oneof_decl.add(name="value")
    value.field[0].oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"fleet.{name}")) for name in _FIELDS}


_CLASSES = _classes()


def make(name: str, **fields: object) -> Wire:
    return _CLASSES[name](**fields)


def encode(message: Wire) -> bytes:
    return cast(bytes, message.SerializeToString(deterministic=True))


def decode(name: str, data: bytes) -> Wire:
    try:
        return _CLASSES[name].FromString(data)
    except Exception as fault:  # protobuf's DecodeError, or what its implementation raises instead
        raise MessageError(f"expected Flower's {name}, got {len(data)} bytes of something else: {fault}") from fault


def name_of(content: bytes) -> str:
    """The name under which an object is stored: its hash."""
    return sha256(content).hexdigest()


def records_object(child: str) -> bytes:
    """The RecordDict of a BAFFLE message, which holds one record: the one with this name."""
    return _pack("RecordDict", child, json.dumps({RECORD: child}).encode())


def record_object(content: bytes) -> bytes:
    """The record that holds these bytes."""
    record = make("ConfigRecord")
    record.items.add(key=KEY).value.bytes = content  # set in place: assigning a message to a field copies it
    return _pack("ConfigRecord", "", encode(record))


def content_of(record: bytes) -> bytes:
    """The bytes in a record: the inverse of `record_object`."""
    head, divider, body = record.partition(b"\0")
    if not divider or head != b"ConfigRecord  %d" % len(body):
        raise MessageError(f"expected a ConfigRecord of {len(body)} bytes, got an object that begins {head[:40]!r}")
    items = decode("ConfigRecord", body).items
    if len(items) != 1 or items[0].key != KEY or not items[0].value.HasField("bytes"):
        raise MessageError(f"expected a ConfigRecord with {KEY!r} as bytes, got {[item.key for item in items]}")
    return cast(bytes, items[0].value.bytes)


def names(tree: Wire) -> list[str]:
    """The names of a message's record, of its RecordDict and of the message itself, from the tree of its objects. Names
    are hashes, so the RecordDict is one of ours exactly if it has the name that ours would have."""
    if len(tree.children) == 1 and len(tree.children[0].children) == 1:
        record = tree.children[0].children[0].object_id
        records = tree.children[0].object_id
        if records == name_of(records_object(record)):
            return [record, records, tree.object_id]
    raise MessageError(f"expected a message whose content is one record named {RECORD!r}, got other content")


def reply(asked: Wire, now: float, below: list[bytes], error: Wire | None) -> tuple[Wire, Wire, dict[str, bytes]]:
    """A reply to the message with the metadata `asked`. Its content is the objects `below`, lowest first; or it is an
    error. Returns the reply without its content, the tree of its objects' names, and the objects, the reply's own
    last."""
    metadata = make(
        "Metadata",
        run_id=asked.run_id,
        src_node_id=asked.dst_node_id,
        dst_node_id=asked.src_node_id,
        reply_to_message_id=asked.message_id,
        group_id=asked.group_id,
        ttl=asked.created_at + asked.ttl - now,  # a reply may not outlive its request
        message_type=asked.message_type,
        created_at=now,
    )
    child = name_of(below[-1]) if below else ""
    whole = _pack("Message", child, encode(make("Message", metadata=metadata, error=error)))
    metadata.message_id = name_of(whole)
    objects = {name_of(content): content for content in (*below, whole)}
    tree: Wire = None
    for name in objects:
        tree = make("ObjectTree", object_id=name, children=[tree] if tree else [])
    envelope = make("Message", metadata=metadata, error=error, content=None if error else make("RecordDict"))
    return envelope, tree, objects


def _pack(kind: str, children: str, body: bytes) -> bytes:
    return b"%b %b %d\0%b" % (kind.encode(), children.encode(), len(body), body)
