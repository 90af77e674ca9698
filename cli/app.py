"""The commands, as one typer app. Each imports what it needs when it runs; see the package docstring for why."""

from __future__ import annotations

import typer

__all__ = ["app"]

app = typer.Typer(
    name="holdfast",
    no_args_is_help=True,
    # Both would import rich to show plain help: 60 ms for colours.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
)


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
