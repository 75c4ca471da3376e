"""All errors of this package, as one tree:

    BaffleError
    ├── PlanError        a setting is unknown, of the wrong type, or out of range
    │   └── OwnFunctionError  a function of the user's own, which a plan names, raised an exception: its cause
    ├── DataError        a data set is missing, or one of its files is damaged
    │   └── UnusableDataError  a data set was read, and cannot be used as it is
    ├── ModelError       an exported model is damaged, of another plan, or cannot be run
    ├── RunFolderError   a run folder cannot be used: it holds another run, is in use, or cannot be written
    │   └── FullDiskError  there is no room for a file of a run
    ├── JournalError     a journal is damaged, or belongs to another plan or version
    │   └── ChainError   a round of the journal does not follow from the one before
    ├── MessageError     a message between client and server is malformed or does not fit the round
    │   ├── RefusalError one side of a secure sum refuses what the other asks
    │   ├── AbstainedError  a client did not do what it was asked; only its own log says why
    │   └── AbortError   too few clients answered to finish a secure sum; nothing was learnt
    ├── TransportError   a server cannot be reached, or does not answer as expected
    │   ├── AwayError    nobody answers at the moment; trying again may help
    │   ├── UnprovedError  whoever answers has not proved to be the server
    │   └── KeyRefusedError  a server does not accept a client's key
    ├── PageError        a page of the paper's tables and figures cannot be read or written
    └── KeysError        a key, a certificate or a roster is missing or is not what it should be

Every message says what was expected, what came, and what to do.
"""

import errno

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""How the system says that there is no room: on the disk, in a quota, or under a limit on the size of files."""

ABSTAINED = "abstained"
"""All that a server says of a client that did not do what it was asked."""


class BaffleError(Exception):
    """Any error that this package raises on purpose."""


class PlanError(BaffleError):
    """A setting is unknown, of the wrong type, or out of range."""


class OwnFunctionError(PlanError):
    """A function of the user's own raised an exception, which is this error's cause. The message says whose function it
    is; the rest is in the traceback of the cause."""


class DataError(BaffleError):
    """A data set is missing, or one of its files is damaged."""


class UnusableDataError(DataError):
    """A data set was read, and cannot be used as it is: it contradicts itself or the plan."""


class ModelError(BaffleError):
    """An exported model is damaged, belongs to another plan, or cannot be run."""


class RunFolderError(BaffleError):
    """A run folder holds another run, is in use, or cannot be written."""


class FullDiskError(RunFolderError):
    """There is no room for a file of a run; once there is, trying again helps. `problem` is the message without what to
    do."""

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


class AbstainedError(MessageError):
    """A client did not do what it was asked. Only its own log says why."""

    def __init__(self) -> None:
        super().__init__(ABSTAINED)


class AbortError(MessageError):
    """Too few clients answered to finish a secure sum; nothing was learnt."""


class TransportError(BaffleError):
    """A server cannot be reached, or does not answer as expected."""


class AwayError(TransportError):
    """Nobody answers at the moment; trying again may help."""


class UnprovedError(TransportError):
    """Whoever answers at a server's address has not proved to be the server."""


class KeyRefusedError(TransportError):
    """A server does not accept a client's key."""


class KeysError(BaffleError):
    """A key, a certificate or a roster is missing, or is not what it should be."""


class PageError(BaffleError):
    """A page of the paper's tables and figures cannot be read or written."""


def unwritable(path: object, fault: OSError, remedy: str) -> RunFolderError:
    """Our error for a file of a run that cannot be written."""
    problem = f"{path} cannot be written: {fault.strerror or fault}"
    return FullDiskError(problem, remedy) if fault.errno in FULL else RunFolderError(f"{problem}; {remedy}")


def first_line(fault: BaseException) -> str:
    """The first line of another library's error message, or the error's type if it has no message. It may quote what a
    stranger sent, so it is fit to be shown."""
    message = str(fault).strip()
    return one_line(message.splitlines()[0], 1_000) if message else type(fault).__name__


def one_line(text: str, most: int = 300) -> str:
    """Text that a stranger may have written, fit to be shown: one line without control characters, of at most `most`
    characters."""
    text = text[: 10 * most]  # it may have megabytes
    shown = " ".join("".join(c for c in text if c.isprintable() or c.isspace()).split())
    return shown if len(shown) <= most else shown[: most - 1] + "…"
