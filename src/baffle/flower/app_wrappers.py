"""Wraps our functions as a ServerApp and a ClientApp, which `flwr run` starts."""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from baffle.errors import MessageError
from baffle.flower.records import content_of, to_record
from baffle.flower.run import AppRun
from baffle.flower.wire import KEY, RECORD

Settings = Mapping[str, bool | int | float | str | bytes]
"""A node's or a run's configuration, as Flower hands it over."""

STATE = "state"
"""The key under which a ClientApp keeps its state in the node's memory of a run."""


def server_app(play: Callable[[AppRun, Settings], None]) -> ServerApp:
    """A ServerApp that calls `play` with the run and its configuration."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        play(AppRun(grid), context.run_config)

    return app


class Delivery(NamedTuple):
    """What a ClientApp is called with: a message's content, the state that it left in the node's memory last time, and
    the configurations of its node and of the run."""

    content: bytes
    state: bytes
    node: Settings
    run: Settings


def client_app(actions: Iterable[str], answer: Callable[[Delivery], tuple[bytes, bytes]]) -> ClientApp:
    """A ClientApp that calls `answer`, which returns a reply and the state to leave in the node's memory."""
    app = ClientApp()

    def handle(message: Message, context: Context) -> Message:
        content = content_of(message)
        if content is None:
            raise MessageError(f"expected a record {RECORD!r} with {KEY!r} as bytes, got another message")
        memory = context.state.get(RECORD)
        state = memory.get(STATE) if isinstance(memory, ConfigRecord) else None
        delivery = Delivery(
            content, state if isinstance(state, bytes) else b"", context.node_config, context.run_config
        )
        reply, state = answer(delivery)
        context.state[RECORD] = ConfigRecord({STATE: state})
        return Message(to_record(reply), reply_to=message)

    for action in actions:
        app.train(action)(handle)
    return app
