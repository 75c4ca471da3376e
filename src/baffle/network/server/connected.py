"""The clients that are connected to a server, and how each of them comes to take part in its run.

`Lines.present` tells which clients are connected. This file keeps what each client's process has been asked, and
whether it takes part in the epoch or waits for the next one.
"""

from collections.abc import Collection, Generator, Iterable, Mapping
from dataclasses import dataclass, field

from baffle.aggregation.server.faults import Faults
from baffle.client.abstaining import Tell
from baffle.core.messages import Message, RoundRequest, encode
from baffle.errors import MessageError
from baffle.network import joining
from baffle.network.clock import Clock
from baffle.network.joining import NO_RUN, Done, Introduction, Lines, M, Ready, expect
from baffle.network.server.epochs import Epochs

AGAIN = 5.0  # seconds until a client that was silent or turned away is asked again

# Yields what a client is asked, and is sent its answers. It returns a Ready if the client takes part from then on.
Conversation = Generator[Message, bytes | None, Ready | None]


@dataclass
class _Process:
    """One process of a client: what it has been asked, and how far it has come."""

    name: object
    talk: Conversation | None = None
    asked: Message | None = None
    reply: joining.Reply | None = None
    introduction: Introduction | None = None  # its introduction, while it waits for the next epoch
    entered: bool = False  # whether it is in the epoch. It stays in it while its line is broken.
    has_roster: bool = False  # whether it was handed the present roster
    refuses: bool = False  # whether it abstained when it was last asked
    ask_after: float = 0.0

    def stop(self) -> None:
        """End the conversation with it. If it is not in the epoch, it is asked again from the beginning."""
        self.talk = self.asked = self.reply = self.introduction = None


@dataclass
class ConnectedClients:
    """Which of the connected clients take part in a run: the transport of its rounds. `offer` says what they hear, and
    `faults` which of them are left out for now."""

    lines: Lines
    offer: Epochs
    tell: Tell
    clock: Clock = field(default_factory=Clock)
    faults: Faults = field(default_factory=Faults)
    ready: set[int] = field(default_factory=set)  # take part, and were connected when the server last looked
    ever_ready: set[int] = field(default_factory=set)  # clients that have been ready at least once
    _processes: dict[int, _Process] = field(default_factory=dict)  # the last one of each client
    _stale: set[int] = field(default_factory=set)  # clients of the epoch that have fallen too far behind
    _told: dict[int, str] = field(default_factory=dict)

    # How one client joins

    def meet(self) -> dict[int, Ready]:
        """Take every connected client one step further towards taking part, without waiting for any, and return those
        that take part from now on. One that comes back as the same process takes part again at once."""
        questions: dict[int, Message] = {}
        for client in self._look():
            process = self._processes[client]
            if self._is_to_be_asked(client, process):
                process.talk = self._join(client, process)
                questions[client] = next(process.talk)
        self._post(questions)
        return self._listen()

    def _join(self, client: int, process: _Process) -> Conversation:
        """What a client is asked: if it is in the epoch, to take part again; otherwise to introduce itself."""
        offer, epoch = self.offer, self.offer.epoch
        if epoch and client in epoch.salters and client not in self._stale:
            begin = epoch.begin(offer.answered(client))
            ready = expect(Ready, (yield from self._ask(process, begin)))
            salted = expect(joining.Salted, (yield epoch.openings()))
            if salted.salt != epoch.salt:
                raise MessageError("it follows another salt")
            process.entered = True
            return ready
        answer = yield from self._ask(process, offer.question)
        if client >= offer.places:
            raise MessageError("it has a place from the next run on")
        process.introduction = expect(Introduction, answer)
        return None

    def _ask(self, process: _Process, question: Message) -> Generator[Message, bytes | None, bytes | None]:
        """Ask a question. A client that does not know the roster is handed it first: once, because it may be long."""
        while (answer := (yield question)) == joining.BEHIND:
            if process.has_roster:
                raise MessageError("it was handed the roster, and says that it does not know it")
            process.has_roster = True
            expect(joining.RosterTaken, (yield self.offer.new_roster))
        return answer

    def _look(self) -> list[int]:
        """See who has come, has left, or was restarted. Returns the clients that are connected."""
        present, before = self.lines.present(), self.ready
        self.ready = set()
        for client, name in present.items():
            process = self._processes.setdefault(client, _Process(name))
            if process.name != name:
                process = self._processes[client] = _Process(name)
                if client in before:
                    self.tell(f"client {client} was restarted")
            elif process.entered:
                self.ready.add(client)
                if client not in before:
                    self.tell(f"client {client} is back")
        for client in self._processes.keys() - present.keys():
            self._processes[client].stop()
            if client in before:
                self.tell(f"client {client} has left")
        return sorted(present)

    def _is_to_be_asked(self, client: int, process: _Process) -> bool:
        if process.talk or process.introduction or process.entered:
            return False
        return self.clock.now() >= process.ask_after and client not in self.faults.barred

    def _post(self, questions: Mapping[int, Message]) -> None:
        replies = self.lines.post(_encoded(questions), NO_RUN) if questions else {}
        for client, reply in replies.items():
            process = self._processes[client]
            process.asked, process.reply = questions[client], reply

    def _listen(self) -> dict[int, Ready]:
        """Go on with the clients that have answered. Returns the clients that take part from now on."""
        started: dict[int, Ready] = {}
        questions: dict[int, Message] = {}
        for client, process in self._processes.items():
            if process.talk is None or process.reply is None or not process.reply.done():
                continue
            try:
                questions[client] = process.talk.send(process.reply.result())
                process.refuses = False
            except StopIteration as end:
                process.talk = process.asked = process.reply = None
                process.refuses = False
                if end.value:
                    started[client] = end.value
            except MessageError as fault:
                self._turn_away(client, str(fault))
        self._post(questions)
        self.ready |= started.keys()
        self.ever_ready |= started.keys()
        return started

    # Who is here

    @property
    def introduced(self) -> dict[int, Introduction]:
        return {client: one.introduction for client, one in self._processes.items() if one.introduction}

    def here(self) -> set[int]:
        """The clients that take part, or wait for the next epoch, and are connected at this moment. A client that is
        left out may be in the present epoch, and is in no later one before its time is over."""
        return (self.ready | self.introduced.keys()) & self.lines.present().keys() - self.faults.barred.keys()

    @property
    def able(self) -> set[int]:
        """The clients that take part and are not left out."""
        return self.ready - self.faults.barred.keys()

    def reachable(self) -> set[int]:
        return self.ready & self.lines.present().keys()

    def refusing(self) -> set[int]:
        """The connected clients that would not take part when they were last asked."""
        present = self.lines.present()
        return {one for one, process in self._processes.items() if process.refuses and present.get(one) == process.name}

    @property
    def starting(self) -> bool:
        """Whether clients of the epoch have been asked and have not answered yet."""
        return any(isinstance(process.asked, joining.Begin | joining.Openings) for process in self._processes.values())

    # How all of them join together: see `Assembly`

    def collect(self, kind: type[M], requests: Mapping[int, Message], *, patient: bool = False) -> dict[int, M]:
        """Ask clients, wait for their answers, and return those of the right kind. The others no longer take part. With
        `patient`, a client whose line is broken has until the deadline to come back and answer."""
        encoded = _encoded(requests)
        replies = self.lines.carry(encoded, NO_RUN, patient=patient) if encoded else {}
        answers: dict[int, M] = {}
        for client in requests:
            try:
                answers[client] = expect(kind, replies.get(client))
            except MessageError as fault:
                self.drop(client, str(fault))
        return answers

    def enter(self, clients: Collection[int]) -> set[int]:
        """A new epoch has begun with these clients. Returns the ones that are still connected."""
        present = self.lines.present()
        self.ready = set()
        for client, process in self._processes.items():
            process.stop()
            process.entered = client in clients and present.get(client) == process.name
            if process.entered:
                self.ready.add(client)
        self.ever_ready |= self.ready
        self._stale = set()
        return self.ready

    def leave_epoch(self) -> None:
        """Another roster counts. Clients that took part wait for the next epoch; others are asked again."""
        for client, process in self._processes.items():
            process.stop()
            process.entered = client in self.ready
            process.has_roster = False

    def forget_introductions(self, clients: Collection[int]) -> None:
        """These clients must introduce themselves again, if they wait for the next epoch."""
        for client in clients & self._processes.keys():
            self._processes[client].introduction = None

    def lose(self, clients: Iterable[int]) -> None:
        """These clients no longer belong to the federation. Another client may get the place of one of them."""
        for client in clients:
            self._forget(client, "no longer belongs to the federation")
            self.ever_ready.discard(client)
            self.faults.forget(client)
            for known in (self._processes, self._told):
                known.pop(client, None)

    def drop(self, client: int, why: str) -> None:
        """Leave a client alone for a while: it has not answered as it should."""
        self._turn_away(client, why)
        self._forget(client, "does not take part")

    # Rounds

    def exchange(self, requests: Mapping[int, bytes]) -> Mapping[int, bytes]:
        """Send requests to clients, return their replies. One that has forgotten the run is told about it again."""
        for client in [client for client, data in requests.items() if len(data) > self.offer.most_request_bytes]:
            self._stale.add(client)
            self._forget(client, "has fallen too far behind, and enters again with the next epoch")
        asked = {client: data for client, data in requests.items() if client in self.ready}
        run = self.offer.epoch.run if self.offer.epoch else NO_RUN
        replies = dict(self.lines.carry(asked, run)) if asked else {}
        for client in [client for client, data in replies.items() if data == joining.UNREADY]:
            del replies[client]
            self._forget(client, "must be told about the run again")
        return replies

    def end_run(self, last: Mapping[int, RoundRequest]) -> dict[int, Done]:
        """Tell clients that the run is over. Returns the answers of those that now hold the last weights."""
        replies = self.exchange({client: encode(joining.Over(request)) for client, request in last.items()})
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

    def _forget(self, client: int, why: str) -> None:
        """A client takes no part any more, and is asked again. One that took part is reported."""
        if process := self._processes.get(client):
            process.stop()
            process.entered = False
        if client in self.ready:
            self.ready.discard(client)
            self.tell(f"client {client} {why}")

    def _turn_away(self, client: int, why: str) -> None:
        """Leave a client alone for a while, and report why: once for each reason, because it is asked again."""
        if process := self._processes.get(client):
            process.stop()
            process.ask_after = self.clock.now() + AGAIN
            process.refuses = process.refuses or why == joining.ABSTAINED
        self._tell_once(client, f"does not take part: {why}")

    def _tell_once(self, client: int, words: str) -> None:
        if self._told.get(client) != words:
            self._told[client] = words
            self.tell(f"client {client} {words}")


def _encoded(messages: Mapping[int, Message]) -> dict[int, bytes]:
    """Each message as bytes; one that goes to several clients is encoded once."""
    once = {message: encode(message) for message in set(messages.values())}
    return {client: once[message] for client, message in messages.items()}
