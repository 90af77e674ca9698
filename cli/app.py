"""The commands, as one typer app. Each imports what it needs when it runs; see the package docstring for why."""

from __future__ import annotations

import typer

from .commands import Commands, complain

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
    depth: int | None = typer.Option(
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


@app.command()
def demo(
    uri: str | None = typer.Argument(
        None, metavar="URI", help="Where the checkpoints go, below it; else into the folder --out."
    ),
    out: str = typer.Option("demo-run", "--out", metavar="FOLDER", help="For logs and pictures; emptied first."),
    steps: int = typer.Option(40, "--steps", help="Training steps in all."),
    kill_at: int = typer.Option(24, "--kill-at", help="In the save of which step a rank is killed."),
    every: int = typer.Option(8, "--every", help="Steps between two saves."),
    ranks_before: int = typer.Option(4, "--ranks-before", help="Ranks until the kill."),
    ranks_after: int = typer.Option(2, "--ranks-after", help="Ranks after it."),
    seed: int = typer.Option(0, "--seed", help="Of weights and batches."),
    json_output: bool = _JSON,
) -> int:
    """Train, kill a rank in the middle of a save, go on with fewer ranks, and compare: about a minute."""
    from importlib.util import find_spec

    if not (find_spec("matplotlib") and find_spec("rich")):
        complain("the demo draws with matplotlib and rich, which come with: pip install 'holdfast[demo]'")
        return 2
    from .demo.run import main

    return main(
        uri=uri,
        out=out,
        steps=steps,
        kill_at=kill_at,
        every=every,
        ranks_before=ranks_before,
        ranks_after=ranks_after,
        seed=seed,
        json_output=json_output,
    )
