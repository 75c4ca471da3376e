"""The commands: run, verify, plan, export, paper, and those of a network."""

import json
import sys
from dataclasses import asdict
from datetime import datetime
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, cast

import click
from msgspec import to_builtins

from baffle.cli import network
from baffle.errors import BaffleError
from baffle.plan import load, presets
from baffle.version import __version__

INTERRUPTED = 130
"""The exit code of a process that Ctrl-C stopped."""

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


set_option = click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", help="Change a setting, e.g. probe.k=50."
)
data_option = click.option(
    "--data", type=click.Path(path_type=Path), help="Folder of data sets (default: $BAFFLE_DATA)."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")


@commands.command()
@click.argument("plan", required=False)
@set_option
@click.option("--out", type=click.Path(path_type=Path), help="The run's folder (default: a new one under runs/).")
@click.option("--resume", "resumed", type=click.Path(path_type=Path), metavar="DIR", help="Go on with the run in DIR.")
@data_option
@click.option("--baseline", is_flag=True, help="Also train by backpropagation, into DIR/baseline, and compare.")
@json_option
@click.option("--quiet", "-q", is_flag=True, help="Print nothing but errors.")
def run(
    plan: str | None,
    settings: tuple[str, ...],
    out: Path | None,
    resumed: Path | None,
    data: Path | None,
    baseline: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Simulate a federation. PLAN is a TOML file or a preset's name (default: digits, ten clients, under a minute)."""
    if resumed and (plan or out):
        raise click.UsageError(
            "--resume DIR goes on with the plan and folder of a run; give no PLAN and no --out with it"
        )
    chosen = None if resumed else load(plan or "digits", settings)
    folder = resumed or out or _new_folder(chosen.name if chosen else "run")
    from baffle.cli import show
    from baffle.simulation import add_baseline, baseline_of, resume, simulate

    if baseline and chosen:
        baseline_of(chosen)  # a plan that has no baseline is refused before it is run

    console, remarks = show.consoles()
    console.quiet = quiet or as_json

    def warn(advice: str) -> None:
        if not quiet:
            remarks.print(f"note: {advice}", soft_wrap=True)

    try:
        with show.watching(console, "probing") as watch:
            if chosen is None:
                summary = resume(folder, settings, data=data, watch=watch)
            else:
                summary = simulate(chosen, folder, data=data, watch=watch, warn=warn)
        if baseline:
            with show.watching(console, "backpropagation") as watch:
                summary = add_baseline(folder, data=data, watch=watch)
    except KeyboardInterrupt:
        if not quiet:
            go_on = f"go on with: baffle run --resume {folder}"
            remarks.print(
                f"stopped; {go_on if (folder / 'plan.toml').exists() else 'nothing was begun'}", soft_wrap=True
            )
        sys.exit(INTERRUPTED)
    if as_json:
        click.echo(json.dumps(summary))
    console.print(show.summary_table(summary))
    console.print(f"  folder            {folder}", soft_wrap=True)


@commands.command()
@click.argument("folder", type=click.Path(path_type=Path))
@json_option
@click.option("--quiet", "-q", is_flag=True, help="Print nothing but errors.")
def verify(folder: Path, as_json: bool, quiet: bool) -> None:
    """Replay the journal of the run in FOLDER and check every hash. Needs NumPy alone."""
    from baffle.cli import show
    from baffle.journal.replay import verify as replay

    console, _ = show.consoles()
    console.quiet = quiet or as_json
    with show.counting(console, "replaying") as progress:
        found = replay(folder, progress)
    if as_json:
        click.echo(json.dumps(asdict(found)))
    console.print(
        f"{found.rounds:,} rounds replayed, every hash right; "
        f"{found.n_weights:,} weights, sha256 {found.weights_sha256}",
        soft_wrap=True,
    )


@commands.command("plan")
@click.argument("plan", required=False)
@set_option
@data_option
@click.option("--list", "list_presets", is_flag=True, help="List the plans that come with BAFFLE.")
@click.option("--toml", is_flag=True, help="Print the whole resolved plan, to start one of your own from.")
@click.option("--show-partition", is_flag=True, help="Draw which client holds how much of which class, and no more.")
@json_option
def plan_command(
    plan: str | None,
    settings: tuple[str, ...],
    data: Path | None,
    list_presets: bool,
    toml: bool,
    show_partition: bool,
    as_json: bool,
) -> None:
    """What a run of PLAN will cost: bytes, forward passes, memory, expected alignment, advice on σ."""
    if list_presets:
        for name in presets():
            click.echo(name)
        return
    from baffle.cli import show

    console, remarks = show.consoles()
    chosen = load(plan or "digits", settings)
    if show_partition:
        from baffle.cli.holdings import holdings, partition_view
        from baffle.data.partition import share_out
        from baffle.data.sources import load as load_data

        source = load_data(chosen.task.data, data, chosen.task.pixels)
        held = holdings(source, share_out(chosen, source))
        if as_json:
            click.echo(json.dumps({"clients": [asdict(one) for one in held]}))
        else:
            console.print(partition_view(held))
        return
    from baffle.task.costs import costs
    from baffle.task.load import load_task

    task = load_task(chosen, data)
    if toml:
        click.echo(task.plan.to_toml(), nl=False)
        return
    found = costs(task)
    if as_json:
        click.echo(json.dumps(asdict(found)))
        return
    console.print(show.costs_table(found))
    for advice in found.advice:
        remarks.print(f"note: {advice}", soft_wrap=True)


@commands.command()
@click.argument("source", required=False)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The model's folder, a new one.")
@click.option("--onnx", type=click.Path(path_type=Path), metavar="FILE", help="A classifier that came as ONNX.")
@click.option("--freeze", multiple=True, metavar="PATTERN", help="With --onnx: weights that stay as they are.")
@set_option
@data_option
@json_option
def export(
    source: str | None,
    out: Path,
    onnx: Path | None,
    freeze: tuple[str, ...],
    settings: tuple[str, ...],
    data: Path | None,
    as_json: bool,
) -> None:
    """A model for devices without PyTorch. SOURCE is a run's folder, a plan's TOML file or a preset's name."""
    if (source is None) == (onnx is None):
        raise click.UsageError("name what to export: a run's folder, a plan, or --onnx FILE, and one of these alone")
    run = Path(source) if source and Path(source).is_dir() else None
    if (freeze and not onnx) or (settings and (onnx or run)):
        raise click.UsageError("--freeze belongs to --onnx FILE, and --set to a plan that has not run")
    from baffle.export import export_onnx, export_plan, export_run

    if onnx:
        manifest = export_onnx(onnx, out, freeze)
    else:
        manifest = export_run(run, out, data=data) if run else export_plan(str(source), out, settings, data=data)
    if as_json:
        click.echo(json.dumps(to_builtins(manifest)))
        return
    from baffle.cli import show

    console, _ = show.consoles()
    for tensor in manifest.weights:
        console.print(f"{tensor.name:40} {' × '.join(map(str, tensor.shape))}", soft_wrap=True)
    console.print(
        f"{manifest.n_weights:,} weights after {manifest.rounds:,} rounds, sha256 {manifest.weights_sha256}, in {out}",
        soft_wrap=True,
    )


@commands.command()
@click.argument("name", required=False)
@click.option("--list", "list_targets", is_flag=True, help="List the tables and figures.")
@click.option("--scale", type=click.Choice(["smoke", "short", "full"]), default="short", show_default=True)
@click.option(
    "--only",
    multiple=True,
    metavar="TEXT",
    help="Only rows whose names hold this, or the row of this name; may be repeated. Rows on the page stay.",
)
@click.option("--runs", type=click.Path(path_type=Path), default=Path("runs"), help="Where runs are kept (runs/).")
@click.option("--out", type=click.Path(path_type=Path), default=Path("paper"), help="Where the page goes (paper/).")
@data_option
@click.option("--quiet", "-q", is_flag=True, help="Print nothing but errors.")
def paper(
    name: str | None,
    list_targets: bool,
    scale: str,
    only: tuple[str, ...],
    runs: Path,
    out: Path,
    data: Path | None,
    quiet: bool,
) -> None:
    """A table or figure of the paper: runs what it needs, goes on with what is there, writes Markdown, JSON and PNG."""
    from baffle.cli import show
    from baffle.paper.targets import TARGETS, target
    from baffle.paper.work import Onlooker, carry_out

    console, _ = show.consoles()
    console.quiet = quiet
    if list_targets or not name:
        for one in TARGETS.values():
            console.print(f"{one.name:19}{one.about}", soft_wrap=True)
        return
    onlooker = Onlooker(partial(show.watching, console), partial(show.telling, console))
    page = carry_out(target(name), cast(Any, scale), runs, out, onlooker, data, only)
    console.print(page.read_text(), soft_wrap=True)
    console.print(f"written to {page}", soft_wrap=True)


for command in (network.keys, network.serve, network.join):
    commands.add_command(command)


def _new_folder(name: str) -> Path:
    stem = f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    candidates = (Path("runs") / (f"{stem}-{i}" if i else stem) for i in count())
    return next(path for path in candidates if not path.exists())


if __name__ == "__main__":
    main()
