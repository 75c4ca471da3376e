"""What a setting may be, and a section of them.

What a setting means stands below it, as a string of Markdown whose links start from docs/. `scripts/reference.py` makes
the table in docs/plans.md of these strings, and a setting without one fails its test.
"""

import sys
from typing import Annotated

import msgspec
from msgspec import Meta

LARGEST = 2**63 - 1
"""TOML, SQLite and the messages between client and server have no larger integers."""

Count = Annotated[int, Meta(ge=1, le=LARGEST)]
OptionalCount = Annotated[int, Meta(ge=0, le=LARGEST)]
Positive = Annotated[float, Meta(gt=0, le=sys.float_info.max)]
NonNegative = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
Proportion = Annotated[float, Meta(gt=0, le=1)]
Decay = Annotated[float, Meta(ge=0, lt=1)]
TensorShape = Annotated[tuple[Count, ...], Meta(max_length=64)]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of a plan; an unknown key in it is an error."""
