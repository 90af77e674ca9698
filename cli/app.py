"""The commands, as one typer app. Each imports what it needs when it runs; see the package docstring for why."""

from __future__ import annotations

import typer

from .commands import Commands

__all__ = ["app"]

app = typer.Typer(
    name="holdfast",
    cls=Commands,
    no_args_is_help=True,
    # Both would import rich to show plain help: 60 ms for colours.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
)

_JSON = typer.Option(False, "--json", help="Print one JSON document instead.")


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"holdfast {version('holdfast')}")
        raise typer.Exit


@app.callback()
def holdfast(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    """Save and load the state of a distributed training job: any layout, any storage, never torn."""


@app.command()
def ls(
    uri: str = typer.Argument(..., metavar="URI", help="A checkpoint, or a folder with checkpoints below it."),
    json_output: bool = _JSON,
) -> int:
    """List the checkpoints at and below URI. Exits with 1 if there is none."""
    from .ls import run

    return run(uri, json_output=json_output)


@app.command()
def show(
    uri: str = typer.Argument(..., metavar="URI", help="A checkpoint."),
    json_output: bool = _JSON,
    values: bool = typer.Option(False, "--values", help="Print small values whole, however long."),
    depth: int = typer.Option(
        None, "--depth", min=0, metavar="N", help="Sum up what lies deeper than N levels; --json gives all."
    ),
) -> int:
    """Show the state in a checkpoint as a tree: tensors, where they lie, and small values."""
    from .show import run

    return run(uri, json_output=json_output, values=values, depth=depth)


@app.command()
def verify(
    uri: str = typer.Argument(..., metavar="URI", help="A checkpoint."),
    json_output: bool = _JSON,
) -> int:
    """Read every byte of a checkpoint and check it. Exits with 1 if any is damaged, 2 if it cannot be read."""
    from .verify import run

    return run(uri, json_output=json_output)
