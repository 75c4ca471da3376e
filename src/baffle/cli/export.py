"""`baffle export`: a model for devices without PyTorch."""

import json
from pathlib import Path
from typing import Any

import click

from baffle.cli.options import data_option, json_option, own_code_option, path, set_option

LOSS = """With --onnx: the loss in the graph, as task.loss names it (default: cross_entropy); none for a function of
your own."""
TRAIN = """With --onnx: what is trained: all floats (the default), head, scales, or a pattern of names;
nonzero: and zeros stay zero. May be repeated."""
BESIDE = """With --onnx: for a client of runs whose model is in this exported folder. FILE is the same model with other
frozen parts, as a quantised backbone."""
SHAPE = """With --onnx: the sizes of one sample, as 1,28,28, if the file leaves them open; NAME=SIZES for each of
several inputs."""


@click.command()
@click.argument("source", required=False)
@click.option("--out", type=path, required=True, help="The model's folder; new or empty. With --plain, a new file.")
@click.option("--plain", is_flag=True, help="Of a run: the trained model as an ONNX file that any runtime takes.")
@click.option("--onnx", type=path, metavar="FILE", help="Export the model in this ONNX file.")
@click.option(
    "--freeze", multiple=True, metavar="PATTERN", help="With --onnx: weights that are not trained; may be repeated."
)
@click.option("--train", multiple=True, metavar="WHAT", help=TRAIN)
@click.option("--loss", metavar="NAME", help=LOSS)
@click.option("--shape", multiple=True, metavar="SIZES", help=SHAPE)
@click.option("--head", is_flag=True, help='With --onnx: for plans with probe.head = "exact".')
@click.option("--beside", type=path, metavar="FOLDER", help=BESIDE)
@click.option("--output", metavar="NAME", default="", help="With --onnx: which of several outputs is trained.")
@set_option
@data_option
@own_code_option
@json_option
def export(
    source: str | None,
    out: Path,
    plain: bool,
    onnx: Path | None,
    freeze: tuple[str, ...],
    train: tuple[str, ...],
    loss: str | None,
    shape: tuple[str, ...],
    head: bool,
    beside: Path | None,
    output: str,
    settings: tuple[str, ...],
    data: Path | None,
    own_code: bool,
    as_json: bool,
) -> None:
    """Export a model for devices without PyTorch. SOURCE is a run's folder, a plan's TOML file or a preset's name."""
    if (source is None) == (onnx is None):
        raise click.UsageError("expected one thing to export: a run's folder, a plan, or --onnx FILE")
    run = Path(source) if source and Path(source).is_dir() else None
    if ((freeze or train or loss or shape or head or beside or output) and not onnx) or (settings and (onnx or run)):
        raise click.UsageError(
            "--freeze, --loss, --shape, --head, --train, --beside and --output belong to --onnx FILE, --set to a plan "
            "that has not run"
        )
    if beside and (freeze or train or loss or shape or head):
        raise click.UsageError("--beside FOLDER says itself what is trained, and how; leave out the rest but --output")
    if plain and not run:
        raise click.UsageError("--plain exports a trained model; expected a run's folder")
    from msgspec import to_builtins

    from baffle.export import export_beside, export_onnx, export_plain, export_plan, export_run
    from baffle.runtime.onnx.model_folder import GRAPH_LOSSES, graph_loss, read_exported

    if plain and run:
        export_plain(run, out, data=data, own_code=own_code)
        click.echo(json.dumps({"model": str(out)}) if as_json else f"{out}: from samples to logits, weights inside")
        return
    if loss and loss not in (*GRAPH_LOSSES, "none"):
        raise click.UsageError(f"--loss: expected {', '.join(GRAPH_LOSSES)} or none, got {loss!r}")
    if onnx and beside:
        manifest = export_beside(onnx, beside, out, output)
    elif onnx:
        wanted = graph_loss(loss or "cross_entropy")
        how: Any = {"head": head, "output": output, "train": train or ("all",)}
        manifest = export_onnx(onnx, out, freeze, _shape(shape), wanted, **how)
    elif run:
        manifest = export_run(run, out, data=data, own_code=own_code)
    else:
        manifest = export_plan(str(source), out, settings, data=data)
    approval = read_exported(out).sha256
    if as_json:
        click.echo(json.dumps({**to_builtins(manifest), "sha256": approval}))
        return
    for tensor in manifest.weights:
        click.echo(f"{tensor.name:40} {' × '.join(map(str, tensor.shape))}")
    if onnx:
        from baffle.runtime.onnx.foreign import numbers_of

        others, zeros = numbers_of(read_exported(out).graph)
        click.echo(f"{manifest.n_weights - zeros:,} of {manifest.n_weights + others:,} numbers train")
    weights = f"{manifest.n_weights:,} weights after {manifest.rounds:,} rounds"
    click.echo(f"{weights}, sha256 {manifest.weights_sha256}, in {out}")
    click.echo(f"hash of the model, with which a client approves it (--model-hash): {approval}")


def _shape(given: tuple[str, ...]) -> tuple[int, ...] | dict[str, tuple[int, ...]]:
    """The shape of a sample: of its only array, or of each array by name."""
    if len(given) < 2 and not any("=" in text for text in given):
        return _sizes(given[0]) if given else ()
    named = [text.rpartition("=") for text in given]
    if not all(name for name, _, _ in named):
        raise click.UsageError(f"--shape: expected NAME=SIZES for each of several inputs, got {' '.join(given)!r}")
    return {name: _sizes(sizes) for name, _, sizes in named}


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(size) for size in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise click.UsageError(f"--shape: expected the sizes of one sample, as 1,28,28, got {text!r}")
    return sizes
