"""The entry of the command line: it calls the commands and reports their errors."""

import sys

import click

from baffle.cli import export, join, keys, paper, plan, run, serve, verify
from baffle.cli.options import INTERRUPTED
from baffle.errors import BaffleError
from baffle.version import __version__

EXTRAS = {
    "torch": "demo",
    "onnx": "export",
    "onnxscript": "export",
    "onnxruntime": "edge",
    "flwr": "flower",
    "google": "edge",
}
"""Packages that a command may need, and the extra that brings each."""


def main() -> None:
    """Run the command line; an error is one line on stderr and exit code 2."""
    try:
        code = commands.main(standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as fault:
        click.echo(fault.format_message(), err=True)
        sys.exit(2)
    except click.ClickException as fault:
        sys.exit(_error(f"{fault.format_message()} (see baffle --help)"))
    except BaffleError as fault:
        sys.exit(_error(str(fault)))
    except ModuleNotFoundError as fault:
        if fault.name not in EXTRAS:
            raise
        sys.exit(_error(f"this command needs {fault.name}: pip install 'baffle[{EXTRAS[fault.name]}]'"))
    except (KeyboardInterrupt, click.Abort):
        sys.exit(INTERRUPTED)
    sys.exit(code or 0)


def _error(message: str) -> int:
    click.echo(f"error: {' '.join(message.split())}", err=True)
    return 2


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="baffle")
def commands() -> None:
    """Federated learning for clients that can only run inference."""


for command in (
    export.export,
    join.join,
    keys.keys,
    paper.paper,
    plan.plan_command,
    run.run,
    serve.serve,
    verify.verify,
):
    commands.add_command(command)


if __name__ == "__main__":
    main()
