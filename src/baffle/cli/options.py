"""Arguments and options that several commands share."""

from pathlib import Path

import click

path = click.Path(path_type=Path)

plan_argument = click.argument("plan", required=False)
set_option = click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", help="Change a setting, e.g. probe.k=50."
)
data_option = click.option("--data", type=path, help="Folder of data sets (default: $BAFFLE_DATA).")
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
quiet_option = click.option("--quiet", "-q", is_flag=True, help="Print nothing but errors.")
log_option = click.option(
    "--log",
    "log_style",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Log lines of text, or one JSON object a line.",
)
