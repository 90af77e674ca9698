"""The argument parser of every command.

Commands import what they need when they run; the package docstring says why.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from .commands import Parsers, add_command, ended
from .manual import HelpFormatter

__all__ = ["command_parser", "run"]


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
        epilog="holdfast COMMAND --help shows details and examples.",
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


def _with_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", dest="json_output", action="store_true", help="print one JSON document instead"
    )


def _add_ls(commands: Parsers) -> None:
    parser = add_command(commands, "ls", "list the checkpoints at and below URI")
    parser.add_argument(
        "uri", metavar="URI", help="a checkpoint, or a folder with checkpoints below it"
    )
    parser.add_argument(
        "--last",
        type=_count,
        metavar="N",
        help="show only the N checkpoints stored last, and read only their manifests",
    )
    _with_json(parser)


def _add_show(commands: Parsers) -> None:
    parser = add_command(
        commands,
        "show",
        "show the state in a checkpoint as a tree: tensors with layouts, and small values",
    )
    parser.add_argument("uri", metavar="URI", help="a checkpoint")
    parser.add_argument("--values", action="store_true", help="print small values in full")
    parser.add_argument(
        "--depth",
        type=_count,
        metavar="N",
        help="summarise everything deeper than N levels; --json prints everything",
    )
    _with_json(parser)


def _add_verify(commands: Parsers) -> None:
    parser = add_command(commands, "verify", "read every byte of a checkpoint and check it")
    parser.add_argument("uri", metavar="URI", help="a checkpoint")
    _with_json(parser)


def _add_diff(commands: Parsers) -> None:
    parser = add_command(
        commands,
        "diff",
        "compare two checkpoints: names, shapes, dtypes and values, whatever their layouts",
    )
    parser.add_argument("a", metavar="A", help="a checkpoint")
    parser.add_argument("b", metavar="B", help="another checkpoint")
    _with_json(parser)


def _add_cp(commands: Parsers) -> None:
    parser = add_command(
        commands,
        "cp",
        "copy a checkpoint to another URI, and verify it on the way",
        "After an interruption, the same command continues where it stopped.",
    )
    parser.add_argument(
        "src",
        metavar="SRC",
        help="a checkpoint; with --recursive, a folder with checkpoints below it",
    )
    parser.add_argument(
        "dst", metavar="DST", help="the URI of the copy; with --recursive, of the folder for copies"
    )
    parser.add_argument(
        "-r", "--recursive", action="store_true", help="copy every checkpoint at and below SRC"
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace other checkpoints, and repair damaged ones",
    )
    _with_json(parser)


def _add_export(commands: Parsers) -> None:
    parser = add_command(
        commands,
        "export",
        "export a checkpoint as a Hugging Face model, a torch.save file, or a DCP folder",
        "A * in a pattern stands for any text; patterns match whole names.",
        runs="conversion:run_export",
    )
    parser.add_argument("uri", metavar="CKPT", help="a checkpoint")
    parser.add_argument("dest", metavar="DEST", help="the URI of a folder; for torch, of a file")
    parser.add_argument(
        "--format",
        choices=("hf", "torch", "dcp"),
        default="hf",
        help="safetensors files in Hugging Face's layout (default), a torch.save file, or a "
        "folder of torch.distributed.checkpoint",
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
        help="limit of the size of a file, such as 500MB or 2GiB (default: 5GB)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier export")
    _with_json(parser)


def _add_import(commands: Parsers) -> None:
    parser = add_command(
        commands,
        "import",
        "make a checkpoint from files of other programs",
        "A * in a pattern stands for any text; patterns match whole names.",
        runs="conversion:run_import",
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
        help="skip matching names, such as 'optim.*'; may be given several times",
    )
    parser.add_argument("--step", type=_count, metavar="N", help="the step to record")
    parser.add_argument("--overwrite", action="store_true", help="replace another checkpoint")
    _with_json(parser)


def _with_names(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PATTERN",
        help="take only matching names, such as 'model.*'; may be given several times",
    )
    parser.add_argument(
        "--rename",
        action="append",
        default=[],
        metavar="OLD=NEW",
        help="rename tensors, such as 'model.*=*'; the first matching rule applies",
    )


def _add_prune(commands: Parsers) -> None:
    parser = add_command(
        commands,
        "prune",
        "delete checkpoints that no rule keeps, and leftovers of dead saves",
        (
            "Without a --keep option or --abandoned it deletes no checkpoint, and it never "
            "deletes the only whole one of a folder."
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
        help="also delete checkpoints that training went back before",
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="read every byte of the kept checkpoints before deleting any",
    )
    parser.add_argument(
        "--idle-hours",
        type=float,
        metavar="H",
        default=24.0,
        help="an unfinished save without a write for this long is dead (default: 24)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print what would be deleted, and delete nothing"
    )
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask for confirmation")
    _with_json(parser)


def _add_report(commands: Parsers) -> None:
    parser = add_command(
        commands,
        "report",
        "show where a save spent its time, and which ranks delayed the others",
        "For a folder of checkpoints, it shows a line for each save.",
    )
    parser.add_argument(
        "uri", metavar="URI", help="a checkpoint, or a folder with checkpoints below it"
    )
    parser.add_argument(
        "--html", metavar="FILE", help="also write the report as an HTML page with charts"
    )
    parser.add_argument("--trace", metavar="FILE", help="also write a trace for ui.perfetto.dev")
    parser.add_argument(
        "--bench",
        metavar="FILE",
        help="compare rates with a result of `holdfast bench --json` for the same storage",
    )
    _with_json(parser)


def _add_bench(commands: Parsers) -> None:
    from .bench.arguments import add_arguments

    parser = add_command(
        commands,
        "bench",
        "measure checkpoints on a storage, next to what a bare client reaches",
        "`holdfast bench compare A.json B.json` compares two results.",
        runs="bench.command:run",
    )
    add_arguments(parser)
    _with_json(parser)


def _add_drivers(commands: Parsers) -> None:
    parser = add_command(
        commands,
        "drivers",
        (
            "list the available storages, or show the traits and options of one, with the source "
            "of each option"
        ),
    )
    parser.add_argument("scheme", metavar="SCHEME", nargs="?", help="a scheme such as s3, or a URI")
    parser.add_argument(
        "--check",
        action="store_true",
        help=(
            "test whether the storage at a URI is fit for checkpoints, in a scratch folder that "
            "is removed"
        ),
    )
    _with_json(parser)


def _add_keeper(commands: Parsers) -> None:
    from .keeper.arguments import add_commands

    parser = add_command(
        commands,
        "keeper",
        "manage keepers, which hold checkpoints in host memory",
        "`holdfast keeper COMMAND --help` describes each command.",
    )
    add_commands(parser, _with_json)


def _add_demo(commands: Parsers) -> None:
    parser = add_command(
        commands,
        "demo",
        "train, kill a rank during a save, resume with fewer ranks, and compare",
        "It takes about a minute.",
        runs="demo.run:main",
        needs=("matplotlib", "rich"),
    )
    parser.add_argument(
        "uri", metavar="URI", nargs="?", help="store the checkpoints below it (default: in --out)"
    )
    options: Sequence[tuple[str, type, Any, str]] = (
        ("--out", str, "demo-run", "folder for logs and pictures; emptied first"),
        ("--steps", int, 40, "number of training steps"),
        ("--kill-at", int, 24, "step during whose save a rank is killed"),
        ("--every", int, 8, "steps between two saves"),
        ("--ranks-before", int, 4, "ranks before the kill"),
        ("--ranks-after", int, 2, "ranks after the kill"),
        ("--seed", int, 0, "seed of weights and batches"),
    )
    for name, kind, default, text in options:
        parser.add_argument(
            name, type=kind, default=default, metavar="X", help=f"{text} (default: {default})"
        )
    _with_json(parser)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 0 or more")
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
