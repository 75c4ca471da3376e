"""The command line: finds commands, runs them, and reports their errors.

A command is a click command in a file of this package, and a line in `COMMANDS`.
"""

import sys
import traceback
from importlib import import_module
from pathlib import Path

import click

from baffle.errors import BaffleError, OwnFunctionError
from baffle.version import __version__

COMMANDS = {
    "export": ("baffle.cli.export", "Export a model for devices without PyTorch."),
    "join": ("baffle.cli.join", "Take part in a server's runs as one client."),
    "keys": ("baffle.cli.keys", "Make the keys of a federation, or change who belongs to it."),
    "paper": ("baffle.cli.run", "Reproduce a table or figure of the paper."),
    "plan": ("baffle.cli.plan", "Show what a run will cost."),
    "report": ("baffle.cli.results", "Show what happened in a run, on one page."),
    "run": ("baffle.cli.run", "Simulate a federation."),
    "serve": ("baffle.cli.serve", "Run a plan with clients that join over a network."),
    "status": ("baffle.cli.results", "Show how a server's run goes."),
    "sweep": ("baffle.cli.sweep", "Run a plan with several seeds and settings."),
    "tune": ("baffle.cli.plan", "Choose σ, rate, K and batch for a plan."),
    "verify": ("baffle.cli.results", "Replay a run's journal and check every hash."),
    "watch": ("baffle.cli.results", "Show a run while it goes on."),
}
"""Each command's module, and the line that `baffle --help` shows for it: the first sentence of the command's own help.
It stands here too so that --help need not import the modules."""

EXTRAS = {
    **{"torch": "torch", "onnx": "onnx", "onnxscript": "export"},
    **{"onnxruntime": "edge", "flwr": "flower", "plotly": "report", "ray": "simulation"},
}
"""Packages that a command may need, and the extra that installs each."""

INTERRUPTED = 130  # the exit code of a process that Ctrl-C stopped


def main() -> None:
    """Run the command line. An error is one line on stderr and exit code 2. A bug in a user's own function also shows
    its traceback."""
    below = ""
    try:
        sys.exit(commands.main(standalone_mode=False) or 0)
    except (KeyboardInterrupt, click.Abort):
        sys.exit(INTERRUPTED)
    except click.exceptions.NoArgsIsHelpError as fault:
        click.echo(fault.format_message(), err=True)
        sys.exit(2)
    except click.ClickException as fault:
        message = _as_setting(fault) or f"{fault.format_message()} (see baffle --help)"
    except BaffleError as fault:
        message, below = str(fault), _traceback(fault) if isinstance(fault, OwnFunctionError) else ""
    except ModuleNotFoundError as fault:
        if fault.name not in EXTRAS:
            raise
        message = f"this command needs {fault.name}: pip install 'baffle[{EXTRAS[fault.name]}]'"
    click.echo(f"error: {' '.join(message.split())}\n{below}", err=True, nl=False)
    sys.exit(2)


def _as_setting(fault: click.ClickException) -> str:
    """What to say of an unknown option that is a key of the plan, as in `--rounds 3`; empty for other mistakes."""
    if not isinstance(fault, click.NoSuchOption) or fault.ctx is None:
        return ""
    if not any(option.name == "settings" for option in fault.ctx.command.params):
        return ""
    from baffle.plan import Plan, keys_of

    name = fault.option_name.lstrip("-").replace("-", "_")
    keys = [key for key in keys_of(Plan) if name in (key, key.rpartition(".")[2], key.replace(".", "_"))]
    words = " ".join(sys.argv).partition(fault.option_name)[2].lstrip("= ").split()
    value = words[0] if words and not words[0].startswith("-") else "VALUE"
    meant = " or ".join(f"--set {key}={value}" for key in keys)
    return f"No such option {fault.option_name!r}; it is a setting of the plan: {meant}" if keys else ""


def _traceback(error: OwnFunctionError) -> str:
    """The traceback of a bug in a user's function, without our own frames above that function."""
    fault = error.__cause__ or error
    frames = traceback.extract_tb(fault.__traceback__)
    ours = str(Path(__file__).parents[1])
    first = next((number for number, frame in enumerate(frames) if not frame.filename.startswith(ours)), 0)
    kept = traceback.StackSummary.from_list(frames[first:])
    return "".join(["Traceback (most recent call last):\n", *kept.format(), *traceback.format_exception_only(fault)])


class LazyCommands(click.Group):
    """Imports the module of a command when that command is called, and none to list them all."""

    def get_command(self, _ctx: click.Context, cmd_name: str) -> click.Command | None:
        return getattr(import_module(COMMANDS[cmd_name][0]), cmd_name) if cmd_name in COMMANDS else None

    def format_commands(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


@click.group(
    cls=LazyCommands,
    # Click lists these names and suggests them for a misspelt one; `get_command` returns the commands themselves.
    commands={name: click.Command(name, short_help=line) for name, (_, line) in COMMANDS.items()},
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="baffle")
def commands() -> None:
    """Federated learning for clients that can only run inference."""


if __name__ == "__main__":
    main()
