"""Our description of Flower's wire format, compared with Flower's own."""

import json
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baffle.errors import MessageError
from baffle.flower import wire


@given(st.binary())
def test_a_record_gives_back_its_content(content: bytes) -> None:
    assert wire.content_of(wire.record_object(content)) == content


@given(st.binary(max_size=100))
def test_records_are_byte_for_byte_those_of_flower(content: bytes) -> None:
    flwr = pytest.importorskip("flwr.app")
    record = flwr.ConfigRecord({wire.KEY: content})
    assert wire.record_object(content) == record.deflate()
    assert wire.records_object(record.object_id) == flwr.RecordDict({wire.RECORD: record}).deflate()


def test_every_field_has_the_number_and_type_that_it_has_in_flower() -> None:
    error = pytest.importorskip("flwr.proto.error_pb2")
    from flwr.proto import fleet_pb2, heartbeat_pb2, message_pb2, node_pb2, recorddict_pb2

    theirs = {
        descriptor.name: descriptor
        for file in (error, fleet_pb2, heartbeat_pb2, message_pb2, node_pb2, recorddict_pb2)
        for descriptor in file.DESCRIPTOR.message_types_by_name.values()
    }
    renamed = {
        "Value": theirs["ConfigRecordValue"],
        "Item": theirs["ConfigRecord"].nested_types_by_name["Item"],
        "RegisterNodeRequest": theirs["RegisterNodeFleetRequest"],
        "RegisterNodeResponse": theirs["RegisterNodeFleetResponse"],
        "UnregisterNodeRequest": theirs["UnregisterNodeFleetRequest"],
        "UnregisterNodeResponse": theirs["UnregisterNodeFleetResponse"],
    }
    for name, ours in wire._CLASSES.items():
        their = renamed.get(name) or theirs[name]
        for field in ours.DESCRIPTOR.fields:
            other = their.fields_by_name[field.name]
            assert (field.number, field.type) == (other.number, other.type), f"{name}.{field.name}"
            assert field.has_presence == other.has_presence, f"{name}.{field.name}"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"ConfigRecord  0",
        b"ConfigRecord  0\0",
        b"ConfigRecord  1\0",
        b"ArrayRecord  0\0",
        b"ConfigRecord  2\0\xff\xff",
        wire.record_object(b"abc")[:-1],
        wire.record_object(b"abc").replace(b"message", b"massage"),
    ],
)
def test_other_objects_are_refused(content: bytes) -> None:
    with pytest.raises(MessageError, match="expected"):
        wire.content_of(content)


def test_the_names_of_a_message_that_is_not_ours_are_refused() -> None:
    record = wire.name_of(wire.record_object(b"abc"))
    body = json.dumps({"other": record}).encode()
    other = sha256(b"RecordDict %s %d\0" % (record.encode(), len(body)) + body).hexdigest()
    ours = wire.name_of(wire.records_object(record))

    def tree(*path: str) -> wire.Wire:
        node = None
        for name in reversed(path):
            node = wire.make("ObjectTree", object_id=name, children=[node] if node else [])
        return node

    assert wire.names(tree("root", ours, record)) == [record, ours, "root"]
    for wrong in (tree("root", other, record), tree("root", ours), tree("root"), tree("root", ours, other)):
        with pytest.raises(MessageError, match="one record named 'baffle'"):
            wire.names(wrong)
