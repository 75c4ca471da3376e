"""How large the messages of a run may be. The limits follow from its plan, so a frame that exceeds them is refused by
its length alone."""

from baffle.aggregation.messages import BOX_BYTES, MOST_KEYS, SIGNATURE_BYTES
from baffle.aggregation.shares import SHARE_BYTES

SMALL = 8 * 1024
"""Room for a message without vectors, shares or keys; and for the rest of a message that has them."""

PLAN_BYTES = SMALL + (4 << 20)
"""Room for a message with a plan: its text has at most a million characters."""

KEY_BYTES = 32 + 5
MEMBER_BYTES = 512
"""Room for a client's commitment and tier in a statement, or for its place in a roster."""


def most_bytes(phase: str, clients: int, contribution: int) -> int:
    """The most bytes that a reply to a request of this kind may have. `contribution` is the size of a contribution in
    this run."""
    match phase:
        case "hello":
            return SMALL + MOST_KEYS * KEY_BYTES
        case "turn":
            return SMALL + clients * (BOX_BYTES + SHARE_BYTES)
        case "request" | "masked-request":
            return SMALL + contribution
        case _:
            return SMALL


def most_joining_bytes(clients: int) -> int:
    """The most bytes that a request may have before a client is in a run: a plan, and a list of clients. In place of a
    plan, some thousand clients more than before have room in a roster."""
    return PLAN_BYTES + clients * MEMBER_BYTES


def most_request_bytes(clients: int, n_weights: int, contribution: int) -> int:
    """The most bytes that a request to a client may have: a whole state of the weights and what two optimizers' vectors
    and an average add to it; or all outcomes that are smaller than that; with lists of clients and their keys."""
    state = 16 * n_weights + contribution
    lists = clients * (4 * 9 + BOX_BYTES + SIGNATURE_BYTES + 256 * KEY_BYTES)
    return most_joining_bytes(clients) + 2 * state + lists
