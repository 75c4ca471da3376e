"""Functions of ours as a ServerApp and a ClientApp, for `flwr run`."""

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
"""A node's or a run's configuration, as Flower gives it."""

STATE = "state"
"""The key, in a node's memory of a run, under which a ClientApp finds what it left there."""


def server_app(play: Callable[[AppRun, Settings], None]) -> ServerApp:
    """A ServerApp that plays a run with the configuration of `flwr run`."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        play(AppRun(grid), context.run_config)

    return app


class Delivery(NamedTuple):
    """A message as it reaches a ClientApp, what the ClientApp left in the node's memory last time, and the
    configurations of its node and of the run."""

    content: bytes
    state: bytes
    node: Settings
    run: Settings


def client_app(actions: Iterable[str], answer: Callable[[Delivery], tuple[bytes, bytes]]) -> ClientApp:
    """A ClientApp from a function that gives a reply and what to leave in the node's memory."""
    app = ClientApp()

    def handle(message: Message, context: Context) -> Message:
        content = content_of(message)
        if content is None:
            raise MessageError(f"expected a record {RECORD!r} with {KEY!r} as bytes, got another message")
        left = context.state.get(RECORD)
        state = left.get(STATE) if isinstance(left, ConfigRecord) else None
        delivery = Delivery(
            content, state if isinstance(state, bytes) else b"", context.node_config, context.run_config
        )
        reply, state = answer(delivery)
        context.state[RECORD] = ConfigRecord({STATE: state})
        return Message(to_record(reply), reply_to=message)

    for one in actions:
        app.train(one)(handle)
    return app
