"""All errors of this package, as one tree:

    BaffleError
    ├── PlanError        a setting is unknown, of the wrong type, or out of range
    │   ├── NoHeadError  a model's last layer has no exact gradient
    │   └── OwnFunctionError  a user's function that a plan names raised an exception: its cause
    ├── DataError        a data set is missing, or one of its files is damaged
    │   └── UnusableDataError  a data set was read, and cannot be used as it is
    ├── ModelError       an exported model is damaged, of another plan, or cannot be run
    ├── RunFolderError   a run folder cannot be used: it holds another run, is in use, or cannot be written
    │   └── FullDiskError  the disk is too full for a file of a run
    ├── JournalError     a journal is damaged, or belongs to another plan or version
    │   └── ChainError   a round of the journal does not follow from the one before
    ├── MessageError     a message between client and server is malformed or does not fit the round
    │   ├── RefusalError one side of a secure sum refuses what the other asks
    │   ├── OutOfReachError  a server would move a client's weights further than its owner allows
    │   ├── AbstainedError  a client did not follow a request; only its own log has the reason
    │   └── AbortError   too few clients answered to finish a secure sum; nothing was learnt
    ├── TransportError   a server cannot be reached, or does not answer as expected
    │   ├── AwayError    the server does not answer at the moment; retrying may help
    │   ├── UnprovedError  the peer at a server's address has not proved to be the server
    │   └── KeyRefusedError  a server does not accept a client's key
    ├── GridError        some runs of a grid failed
    ├── PageError        a page of the paper's tables and figures cannot be read or written
    └── KeysError        a key, a certificate or a roster is missing or is not what it should be

Every message says what was expected, what came, and what to do.
"""

import errno

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Error numbers that mean that the disk, a quota or a file-size limit is full."""

ABSTAINED = "abstained"  # how a server records a client that did not follow a request


class BaffleError(Exception):
    """Any error that this package raises on purpose."""


class PlanError(BaffleError):
    """A setting is unknown, of the wrong type, or out of range."""


class NoHeadError(PlanError):
    """A model's last layer has no exact gradient, because of what was found in its place."""

    def __init__(self, found: str) -> None:
        super().__init__(
            f'probe.head: {found}; expected a last linear layer whose weights are trained, or probe.head = "probed"'
        )
        self.found = found


class OwnFunctionError(PlanError):
    """A user's function raised an exception, which is this error's cause. The message names the function; the traceback
    of the cause has the rest."""


class DataError(BaffleError):
    """A data set is missing, or one of its files is damaged."""


class UnusableDataError(DataError):
    """A data set was read, and cannot be used as it is: it contradicts itself or the plan."""


class ModelError(BaffleError):
    """An exported model is damaged, belongs to another plan, or cannot be run."""


class RunFolderError(BaffleError):
    """A run folder holds another run, is in use, or cannot be written."""


class FullDiskError(RunFolderError):
    """The disk is too full for a file of a run; retrying helps once there is room. `problem` is the message without the
    remedy."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}; {remedy}")
        self.problem = problem


class JournalError(BaffleError):
    """A journal is damaged, or belongs to another plan or version."""


class ChainError(JournalError):
    """A round of the journal does not follow from the one before."""

    def __init__(self, message: str, round_number: int) -> None:
        super().__init__(message)
        self.round_number = round_number


class MessageError(BaffleError):
    """A message between client and server is malformed or does not fit the round."""


class RefusalError(MessageError):
    """One side of a secure sum refuses what the other asks."""


class OutOfReachError(MessageError):
    """A server would move a client's weights further than the client's owner allows."""


class AbstainedError(MessageError):
    """A client did not follow a request. Only its own log has the reason."""

    def __init__(self) -> None:
        super().__init__(ABSTAINED)


class AbortError(MessageError):
    """Too few clients answered to finish a secure sum; nothing was learnt."""


class TransportError(BaffleError):
    """A server cannot be reached, or does not answer as expected."""


class AwayError(TransportError):
    """The server does not answer at the moment; retrying may help."""


class UnprovedError(TransportError):
    """The peer at a server's address has not proved to be the server."""


class KeyRefusedError(TransportError):
    """A server does not accept a client's key."""


class KeysError(BaffleError):
    """A key, a certificate or a roster is missing, or is not what it should be."""


class GridError(BaffleError):
    """Some runs of a grid failed. The message names them; the others are finished and kept."""


class PageError(BaffleError):
    """A page of the paper's tables and figures cannot be read or written."""


def unwritable(path: object, fault: OSError, remedy: str) -> RunFolderError:
    """The error for a run's file that cannot be written."""
    problem = f"{path} cannot be written: {fault.strerror or fault}"
    return FullDiskError(problem, remedy) if fault.errno in FULL else RunFolderError(f"{problem}; {remedy}")


def first_line(fault: BaseException) -> str:
    """The first line of another library's error message, or the error's type if it has no message. The message may
    quote untrusted input, so it is cleaned for display."""
    message = str(fault).strip()
    return one_line(message.splitlines()[0], 1_000) if message else type(fault).__name__


def one_line(text: str, most: int = 300) -> str:
    """Clean untrusted text for display: one line of at most `most` characters, without control characters."""
    text = text[: 10 * most]  # it may have megabytes
    shown = " ".join("".join(c for c in text if c.isprintable() or c.isspace()).split())
    return shown if len(shown) <= most else shown[: most - 1] + "…"
