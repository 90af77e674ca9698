"""The argument parser of every command.

Commands import what they need when they run; the package docstring says why.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from .commands import complain, ended
from .manual import MANUAL, HelpFormatter, closing_words

__all__ = ["command_parser", "run"]

Parsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""Registry of subcommands."""


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit status. Raises SystemExit if argparse has answered
    already."""
    parser = command_parser()
    args = vars(parser.parse_args(arguments))
    command: Callable[..., int] | None = args.pop("run", None)
    if args.pop("version", False):
        return _print_version()
    if command is None:
        parser.print_help(sys.stderr)
        return 2
    return ended(lambda: command(**args))


def command_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line. The documentation is generated from it as well."""
    parser = argparse.ArgumentParser(
        prog="holdfast",
        description=(
            "Save and load the state of a distributed training job: any layout, any "
            "storage, never torn."
        ),
        epilog="holdfast COMMAND --help tells more, with examples.",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for add in (
        _add_ls,
        _add_show,
        _add_verify,
        _add_diff,
        _add_cp,
        _add_export,
        _add_import,
        _add_prune,
        _add_report,
        _add_bench,
        _add_keeper,
        _add_drivers,
        _add_demo,
    ):
        add(commands)
    return parser


def _command(
    commands: Parsers, run: Callable[..., int], summary: str, more: str = ""
) -> argparse.ArgumentParser:
    """Add a command named after its function. Its arguments become the function's keywords."""
    name = run.__name__.lstrip("_")
    parser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary}. {more}".strip(),
        epilog=closing_words(MANUAL[name]),
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    return parser


def _with_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", dest="json_output", action="store_true", help="print one JSON document instead"
    )


def _add_ls(commands: Parsers) -> None:
    def ls(**arguments: Any) -> int:
        from .ls import run

        return run(**arguments)

    parser = _command(commands, ls, "list the checkpoints at and below URI")
    parser.add_argument(
        "uri", metavar="URI", help="a checkpoint, or a folder with checkpoints below it"
    )
    parser.add_argument(
        "--last",
        type=_count,
        metavar="N",
        help="only the N that were stored last; the manifests of others are not read",
    )
    _with_json(parser)


def _add_show(commands: Parsers) -> None:
    def show(**arguments: Any) -> int:
        from .show import run

        return run(**arguments)

    parser = _command(
        commands,
        show,
        "show the state in a checkpoint as a tree: tensors, where they lie, and small values",
    )
    parser.add_argument("uri", metavar="URI", help="a checkpoint")
    parser.add_argument(
        "--values", action="store_true", help="print small values whole, however long"
    )
    parser.add_argument(
        "--depth",
        type=_count,
        metavar="N",
        help="sum up what lies deeper than N levels; --json gives all",
    )
    _with_json(parser)


def _add_verify(commands: Parsers) -> None:
    def verify(**arguments: Any) -> int:
        from .verify import run

        return run(**arguments)

    parser = _command(commands, verify, "read every byte of a checkpoint and check it")
    parser.add_argument("uri", metavar="URI", help="a checkpoint")
    _with_json(parser)


def _add_diff(commands: Parsers) -> None:
    def diff(**arguments: Any) -> int:
        from .diff import run

        return run(**arguments)

    parser = _command(
        commands,
        diff,
        "compare two checkpoints: names, shapes, dtypes and values, whatever their layouts",
    )
    parser.add_argument("a", metavar="A", help="a checkpoint")
    parser.add_argument("b", metavar="B", help="another one")
    _with_json(parser)


def _add_cp(commands: Parsers) -> None:
    def cp(**arguments: Any) -> int:
        from .cp import run

        return run(**arguments)

    parser = _command(
        commands,
        cp,
        "copy a checkpoint to another URI, verified on the way",
        "Interrupted, the same command goes on where it stopped.",
    )
    parser.add_argument(
        "src",
        metavar="SRC",
        help="a checkpoint; with --recursive, a folder with checkpoints below it",
    )
    parser.add_argument(
        "dst", metavar="DST", help="the URI of the copy, or of the folder of copies"
    )
    parser.add_argument(
        "-r", "--recursive", action="store_true", help="copy every checkpoint at and below SRC"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace other checkpoints, and mend damaged ones"
    )
    _with_json(parser)


def _add_export(commands: Parsers) -> None:
    def export(**arguments: Any) -> int:
        from .export import run

        return run(**arguments)

    parser = _command(
        commands,
        export,
        "write a checkpoint as a Hugging Face model, a file of torch.save, or a folder of DCP",
        "A * in a pattern stands for any text; patterns match whole names.",
    )
    parser.add_argument("uri", metavar="CKPT", help="a checkpoint")
    parser.add_argument("dest", metavar="DEST", help="the URI of a folder; with torch, of a file")
    parser.add_argument(
        "--format",
        choices=("hf", "torch", "dcp"),
        default="hf",
        help="safetensors files as Hugging Face has them (default), a file of torch.save, or a "
        "folder of torch's distributed checkpoint",
    )
    parser.add_argument(
        "--dtype", metavar="DTYPE", help="convert floating-point tensors: bf16, fp16, fp32, fp64"
    )
    _with_names(parser)
    parser.add_argument(
        "--shard",
        type=_size,
        metavar="SIZE",
        default=5_000_000_000,
        help="at most so much in a file, such as 500MB or 2GiB (default: 5GB)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier export")
    _with_json(parser)


def _add_import(commands: Parsers) -> None:
    def _import(**arguments: Any) -> int:
        from .imports import run

        return run(**arguments)

    parser = _command(
        commands,
        _import,
        "make a checkpoint of what other programs have written",
        "A * in a pattern stands for any text; patterns match whole names.",
    )
    parser.add_argument(
        "source",
        metavar="SRC",
        help="a safetensors file, a folder of them, a .pt file, or a folder of DCP, Megatron or "
        "DeepSpeed; any URI",
    )
    parser.add_argument("uri", metavar="DEST", help="the URI of the checkpoint")
    _with_names(parser)
    parser.add_argument(
        "--skip",
        action="append",
        default=[],
        metavar="PATTERN",
        help="leave out what has such names: 'optim.*'; may be given several times",
    )
    parser.add_argument("--step", type=_count, metavar="N", help="the step that is recorded")
    parser.add_argument("--overwrite", action="store_true", help="replace another checkpoint")
    _with_json(parser)


def _with_names(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PATTERN",
        help="take tensors with such names alone: 'model.*'; may be given several times",
    )
    parser.add_argument(
        "--rename",
        action="append",
        default=[],
        metavar="OLD=NEW",
        help="rename tensors: 'model.*=*'; the first rule that matches a name applies",
    )


def _add_prune(commands: Parsers) -> None:
    def prune(**arguments: Any) -> int:
        from .prune import run

        return run(**arguments)

    parser = _command(
        commands,
        prune,
        "delete checkpoints that are not to be kept, and what dead saves left",
        (
            "Deletes no checkpoint without a --keep option or --abandoned, and never the "
            "only whole "
            "one of a folder."
        ),
    )
    parser.add_argument("uri", metavar="URI", help="a folder with checkpoints below it")
    parser.add_argument(
        "--keep-last", type=_count, metavar="N", help="keep the N highest steps of each folder"
    )
    parser.add_argument(
        "--keep-every", type=_count, metavar="N", help="keep steps that are a multiple of N"
    )
    parser.add_argument(
        "--abandoned",
        action="store_true",
        help="delete checkpoints that training went back before, too",
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="read every byte of what is kept, before anything goes",
    )
    parser.add_argument(
        "--idle-hours",
        type=float,
        metavar="H",
        default=24.0,
        help="an unfinished save is dead when it wrote nothing for so long (default: 24)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="say what would be deleted, and delete nothing"
    )
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")
    _with_json(parser)


def _add_report(commands: Parsers) -> None:
    def report(**arguments: Any) -> int:
        from .report import run

        return run(**arguments)

    parser = _command(
        commands,
        report,
        "show where the time of a save went, and which ranks kept the others waiting",
        "Of a folder of checkpoints, their saves one after the other.",
    )
    parser.add_argument(
        "uri", metavar="URI", help="a checkpoint, or a folder with checkpoints below it"
    )
    parser.add_argument(
        "--html", metavar="FILE", help="write it as a page for a browser as well, with pictures"
    )
    parser.add_argument(
        "--trace", metavar="FILE", help="write a trace as well, which ui.perfetto.dev opens"
    )
    parser.add_argument(
        "--bench",
        metavar="FILE",
        help="hold rates against a result of `holdfast bench --json` for the same storage",
    )
    _with_json(parser)


def _add_bench(commands: Parsers) -> None:
    from .bench.arguments import add_arguments

    def bench(**arguments: Any) -> int:
        from .bench.command import run

        return run(**arguments)

    parser = _command(
        commands,
        bench,
        "measure what a storage gives checkpoints, beside what it gives a bare client",
        "`holdfast bench compare A.json B.json` holds two results against each other.",
    )
    add_arguments(parser)
    _with_json(parser)


def _add_drivers(commands: Parsers) -> None:
    def drivers(check: bool, **arguments: Any) -> int:
        if check:
            from .check import run as run_check

            return run_check(arguments["scheme"], json_output=arguments["json_output"])
        from .drivers import run

        return run(**arguments)

    parser = _command(
        commands,
        drivers,
        (
            "list the storages that can be used, or show one's traits and options, and where each "
            "comes from"
        ),
    )
    parser.add_argument("scheme", metavar="SCHEME", nargs="?", help="a scheme such as s3, or a URI")
    parser.add_argument(
        "--check",
        action="store_true",
        help=(
            "try the storage at a URI, in a scratch folder that is removed: is it fit for "
            "checkpoints?"
        ),
    )
    _with_json(parser)


def _add_keeper(commands: Parsers) -> None:
    from .keeper.arguments import add_commands

    def keeper(**arguments: Any) -> int:
        from .keeper.command import run

        return run(**arguments)

    parser = _command(
        commands,
        keeper,
        "work with keepers, which hold checkpoints in the memory of hosts",
        "`holdfast keeper COMMAND --help` tells what each of its commands takes.",
    )
    add_commands(parser, _with_json)


def _add_demo(commands: Parsers) -> None:
    def demo(**arguments: Any) -> int:
        from importlib.util import find_spec

        if not (find_spec("matplotlib") and find_spec("rich")):
            complain("the demo draws with matplotlib and rich: pip install matplotlib rich")
            return 2
        from .demo.run import main

        return main(**arguments)

    parser = _command(
        commands,
        demo,
        "train, kill a rank in the middle of a save, go on with fewer ranks, and compare",
        "It takes about a minute.",
    )
    parser.add_argument(
        "uri", metavar="URI", nargs="?", help="where the checkpoints go, below it; else into --out"
    )
    options: Sequence[tuple[str, type, Any, str]] = (
        ("--out", str, "demo-run", "folder for logs and pictures; emptied first"),
        ("--steps", int, 40, "training steps in all"),
        ("--kill-at", int, 24, "in the save of which step a rank is killed"),
        ("--every", int, 8, "steps between two saves"),
        ("--ranks-before", int, 4, "ranks until the kill"),
        ("--ranks-after", int, 2, "ranks after it"),
        ("--seed", int, 0, "of weights and batches"),
    )
    for name, kind, default, text in options:
        parser.add_argument(
            name, type=kind, default=default, metavar="X", help=f"{text} (default: {default})"
        )
    _with_json(parser)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0")
    return int(text)


def _size(text: str) -> int:
    from ..core.units import parse_size

    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _print_version() -> int:
    from importlib.metadata import version

    print(f"holdfast {version('holdfast-checkpoint')}")
    return 0
