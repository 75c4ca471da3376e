"""The clients that are connected to a server, and how each of them comes to take part in its run."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from baffle.core.messages import Message, RoundRequest, encode
from baffle.errors import MessageError
from baffle.network.joining import (
    ABSTAINED,
    BEHIND,
    NO_RUN,
    UNREADY,
    Begin,
    Done,
    EpochTerms,
    Introduce,
    Introduction,
    Lines,
    M,
    NewRoster,
    Openings,
    Over,
    Ready,
    Reply,
    RosterTaken,
    Salted,
    expect,
)

AGAIN = 5.0
"""Seconds until a client that was silent or turned away is asked again."""

LEFT_OUT, MOST_DOUBLINGS = 30.0, 12
"""Seconds for which a client that has spoilt a statement, by not opening its nonce, is not asked. Each time it is twice
as long: clients open only so many nonces a day in vain, and one client must not use that up for all."""


@dataclass(frozen=True)
class _Question:
    """What a client's process was asked, and its answer when it comes. `ready`: its answer before."""

    process: object
    asked: Message
    reply: Reply
    ready: Ready | None


def _encoded(messages: Mapping[int, Message]) -> dict[int, bytes]:
    """Each message as bytes; one that goes to several clients is encoded once."""
    encoded_once = {id(message): encode(message) for message in messages.values()}
    return {client: encoded_once[id(message)] for client, message in messages.items()}


@dataclass
class ConnectedClients:
    """Which of the connected clients take part in a run. For its rounds this is the transport to them."""

    lines: Lines
    tell: Callable[[str], None]
    epoch: EpochTerms | None = None
    """The present epoch; None before the first."""
    introduce: Introduce | None = None
    """What clients that are not in the epoch are asked; None if they are not asked yet."""
    roster: NewRoster | None = None
    """The roster, for clients that do not know it yet."""
    places: int = 1 << 62
    """Clients with higher numbers have no place in this run."""
    introduced: dict[int, Introduction] = field(default_factory=dict)
    """Clients that wait for the next epoch."""
    ready: set[int] = field(default_factory=set)
    """Clients that take part in the epoch."""
    ever_ready: set[int] = field(default_factory=set)
    """Clients that have been ready at least once."""
    answered: Callable[[int], int] = lambda _client: 0
    """One more than the last round that a client contributed to."""
    most_request_bytes: int = 1 << 62
    """The most bytes of a request that a client accepts."""
    _stale: set[int] = field(default_factory=set)  # clients of the epoch that have fallen too far behind
    _met: dict[int, object] = field(default_factory=dict)  # client → the process that is introduced or ready
    _open: dict[int, _Question] = field(default_factory=dict)  # clients that have not answered yet
    _away: dict[int, object] = field(default_factory=dict)  # clients that took part and have left, by their processes
    _spoilt: dict[int, tuple[int, float]] = field(default_factory=dict)  # how often, and until when it is left out
    _ask_after: dict[int, tuple[object, float]] = field(default_factory=dict)
    _told: dict[int, str] = field(default_factory=dict)
    _refusing: dict[int, object] = field(default_factory=dict)  # clients that abstained when they were last asked
    _handed: dict[int, object] = field(default_factory=dict)  # clients that were handed the roster

    def meet(self) -> dict[int, Ready]:
        """Take every connected client one step further towards taking part, and return those that take part from now
        on. Nobody waits for a client that takes its time. One that will not take part is reported and left alone for a
        while. One whose line broke and that comes back as the same process takes part again at once."""
        present = self.lines.present()
        for client, process in list(self._met.items()):
            if client not in present:
                self._away |= {client: process} if client in self.ready else {}
                self._forget(client, "has left")
            elif present[client] != process:
                self._forget(client, "was restarted")
        for client, process in list(self._away.items()):
            if client in present:
                del self._away[client]
                self._take_back(client, process, present[client])
        for client, question in list(self._open.items()):
            if present.get(client) != question.process:
                del self._open[client]
        self._ask([client for client in sorted(present) if self._is_to_be_asked(client, present[client])], present)
        started: dict[int, Ready] = {}
        for client, question in list(self._open.items()):
            if question.reply.done():
                del self._open[client]
                self._take(client, question, started)
        return started

    def here(self) -> set[int]:
        """The clients that take part, or wait for the next epoch, and are connected at this moment."""
        return (self.ready | self.introduced.keys()) & self.lines.present().keys()

    def reachable(self) -> set[int]:
        """The clients that take part and are connected at this moment."""
        return self.ready & self.lines.present().keys()

    def refusing(self) -> set[int]:
        """The connected clients that would not take part when they were last asked."""
        present = self.lines.present()
        return {client for client, process in self._refusing.items() if present.get(client) == process}

    @property
    def starting(self) -> bool:
        """Whether clients of the epoch have been asked and have not answered yet."""
        return any(isinstance(question.asked, Begin | Openings) for question in self._open.values())

    def collect(self, kind: type[M], requests: Mapping[int, Message]) -> dict[int, M]:
        """Ask clients, wait for their answers, and return those of the right kind. The others no longer take part."""
        encoded = _encoded(requests)
        replies = self.lines.carry(encoded, NO_RUN) if encoded else {}
        answers: dict[int, M] = {}
        for client in requests:
            try:
                answers[client] = expect(kind, replies.get(client))
            except MessageError as fault:
                self.drop(client, str(fault))
        return answers

    def enter(self, epoch: EpochTerms, clients: Mapping[int, object]) -> None:
        """A new epoch has begun, with these clients and processes."""
        self.epoch = epoch
        self.introduced = {}
        self.ready = set(clients)
        self.ever_ready |= self.ready
        self._met = dict(clients)
        self._open = {}
        self._away = {}
        self._stale = set()

    def lose(self, clients: Iterable[int]) -> None:
        """These clients no longer belong to the federation. Whoever gets one of their places is somebody else."""
        for client in clients:
            self._forget(client, "no longer belongs to the federation")
            self.ever_ready.discard(client)
            for known in (self._away, self._spoilt, self._ask_after, self._told, self._refusing):
                known.pop(client, None)

    def hand_over(self, roster: NewRoster) -> None:
        """Another roster counts from now on, and the epoch under the one before is over. Those that take part are
        handed it at once; others when they are asked again."""
        self.roster, self.epoch = roster, None
        self.introduced, self._open, self._away, self._handed = {}, {}, {}, {}
        self._met = {client: process for client, process in self._met.items() if client in self.ready}
        self.collect(RosterTaken, dict.fromkeys(sorted(self.reachable()), roster))

    def processes(self, clients: Iterable[int]) -> dict[int, object]:
        """The processes of clients that are connected."""
        present = self.lines.present()
        return {client: present[client] for client in clients if client in present}

    def drop(self, client: int, why: str) -> None:
        """Leave a client alone for a while: it has not answered as it should."""
        process = self.lines.present().get(client)
        self._turn_away(client, process, why)
        self._forget(client, "does not take part")

    def leave_out(self, client: int) -> None:
        """Do not ask a client for a while, whatever process it comes as."""
        times = self._spoilt.get(client, (0, 0.0))[0]
        self._spoilt[client] = times + 1, time.monotonic() + LEFT_OUT * 2 ** min(times, MOST_DOUBLINGS)

    def end_run(self, last: Mapping[int, RoundRequest]) -> dict[int, Done]:
        """Tell the clients that the run is over, each with the request that brings it to the last weights. Returns
        the answers of those that now hold them."""
        replies = self.exchange({client: encode(Over(request)) for client, request in last.items()})
        holders: dict[int, Done] = {}
        for client, data in replies.items():
            try:
                done = expect(Done, data)
                if done.weights_hash != last[client].weights_hash:
                    raise MessageError("it holds others")
                holders[client] = done
            except MessageError as fault:
                self._tell_once(client, f"does not hold the last weights: {fault}")
        return holders

    def exchange(self, requests: Mapping[int, bytes]) -> Mapping[int, bytes]:
        """Send requests to the clients of the run and return their replies. A client that has forgotten the run
        is told about it again before the next round."""
        for client in [client for client, data in requests.items() if len(data) > self.most_request_bytes]:
            self._stale.add(client)
            self._forget(client, "has fallen too far behind, and enters again with the next epoch")
        asked = {client: data for client, data in requests.items() if client in self.ready}
        run = self.epoch.run if self.epoch else NO_RUN
        replies = dict(self.lines.carry(asked, run)) if asked else {}
        for client in [client for client, data in replies.items() if data == UNREADY]:
            del replies[client]
            self._away.pop(client, None)
            self._forget(client, "must be told about the run again")
        return replies

    def _is_to_be_asked(self, client: int, process: object) -> bool:
        if client in self._open or self._met.get(client) == process:
            return False
        if time.monotonic() < self._spoilt.get(client, (0, 0.0))[1]:
            return False
        turned_away, until = self._ask_after.get(client, (None, 0.0))
        return not (process == turned_away and time.monotonic() < until)

    def _ask(self, clients: Iterable[int], present: Mapping[int, object]) -> None:
        """Ask clients of the epoch to take part again, and others to introduce themselves."""
        begins: dict[int, Begin] = {}
        questions: dict[int, Message] = {}
        for client in clients:
            if self.epoch and client in self.epoch.salters and client not in self._stale:
                number = self.answered(client)
                questions[client] = begins.setdefault(number, self.epoch.begin(number))
            elif self.introduce:
                questions[client] = self.introduce
        self._post(questions, {client: present[client] for client in questions})

    def _take(self, client: int, question: _Question, started: dict[int, Ready]) -> None:
        """Take a client's answer. It is the last one, or leads to another question."""
        try:
            match question.asked:
                case Introduce() | Begin() if self.roster and question.reply.result() == BEHIND:
                    self._hand(client, question.process, self.roster)
                case NewRoster():
                    expect(RosterTaken, question.reply.result())
                    self._ask([client], {client: question.process})
                case Introduce() if client >= self.places:
                    raise MessageError("it has a place from the next run on")
                case Introduce():
                    self.introduced[client] = expect(Introduction, question.reply.result())
                    self._met[client] = question.process
                case Begin() if self.epoch:
                    ready = expect(Ready, question.reply.result())
                    self._post({client: self.epoch.openings()}, {client: question.process}, ready)
                case _ if self.epoch and question.ready:
                    if expect(Salted, question.reply.result()).salt != self.epoch.salt:
                        raise MessageError("it follows another salt")
                    self._met[client] = question.process
                    self.ready.add(client)
                    self.ever_ready.add(client)
                    started[client] = question.ready
            self._refusing.pop(client, None)
        except MessageError as fault:
            self._turn_away(client, question.process, str(fault))

    def _hand(self, client: int, process: object, roster: NewRoster) -> None:
        """Hand the roster to a client that does not know it: once, because it may be long."""
        if self._handed.get(client) == process:
            raise MessageError("it was handed the roster, and says that it does not know it")
        self._handed[client] = process
        self._post({client: roster}, {client: process})

    def _post(
        self, questions: Mapping[int, Message], processes: Mapping[int, object], ready: Ready | None = None
    ) -> None:
        """Send each client its message without waiting for the reply."""
        if not questions:
            return
        replies = self.lines.post(_encoded(questions), NO_RUN)
        for client, reply in replies.items():
            self._open[client] = _Question(processes[client], questions[client], reply, ready)

    def _take_back(self, client: int, before: object, now: object) -> None:
        """A client whose line broke is here again. If it is the same process, it still knows the run."""
        if before == now:
            self._met[client] = now
            self.ready.add(client)
            self.tell(f"client {client} is back")

    def _forget(self, client: int, why: str) -> None:
        """Forget that we have met this client. A client that took part is reported."""
        self._met.pop(client, None)
        self._open.pop(client, None)
        self.introduced.pop(client, None)
        if client in self.ready:
            self.ready.discard(client)
            self.tell(f"client {client} {why}")

    def _turn_away(self, client: int, process: object, why: str) -> None:
        """Leave a client alone for a while, and report why: once for each reason, because it is asked again and
        again."""
        self._ask_after[client] = process, time.monotonic() + AGAIN
        if why == ABSTAINED:
            self._refusing[client] = process
        self._tell_once(client, f"does not take part: {why}")

    def _tell_once(self, client: int, words: str) -> None:
        if self._told.get(client) != words:
            self._told[client] = words
            self.tell(f"client {client} {words}")
