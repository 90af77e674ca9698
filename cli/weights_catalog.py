"""The commands of ``holdfast weights``; see :mod:`.catalog`."""

from __future__ import annotations

from .commands import JSON, ONLY, RENAME, Command, argument, count

CHANNEL = argument("uri", "URI", "the folder of the channel, as given to holdfast.publish")
VERSION = argument(
    "number", "VERSION", "the version, as its publisher numbered it", nargs="?", type=count
)

WEIGHTS: tuple[Command, ...] = (
    Command(
        "weights",
        "list, follow, publish and copy versions of weights in a channel",
        more="`holdfast weights COMMAND --help` describes each command.",
        examples={"holdfast weights ls s3://bucket/policy": "the versions in a channel"},
        statuses={0: "success"},
    ),
    Command(
        "weights ls",
        "list the versions in a weight channel",
        more="A version is an anchor, which is stored whole, or a patch. Those that are not "
        "offered any more are bases of others, or a subscriber is reading them.",
        runs="weights:ls",
        arguments=(CHANNEL, JSON),
        examples={
            "holdfast weights ls s3://bucket/policy": "bytes, age and readers of each version"
        },
        statuses={0: "there are versions", 1: "there are none"},
    ),
    Command(
        "weights show",
        "show one version: its bases, bytes of each rank, share that has changed, and tensors",
        runs="weights:show",
        arguments=(
            CHANNEL,
            VERSION,
            argument("--depth", "N", "summarise everything deeper than N levels", type=count),
            JSON,
        ),
        examples={
            "holdfast weights show s3://bucket/policy": "the newest version",
            "holdfast weights show s3://bucket/policy 120 --depth 1": "version 120, as a summary",
        },
        statuses={0: "the version was shown"},
    ),
    Command(
        "weights follow",
        "print each version as it is published",
        more="Begins with the newest version. If several are published at once, it takes the last. "
        "With --into it keeps the weights in host memory, and reads only what has changed.",
        runs="weights:follow",
        arguments=(
            CHANNEL,
            argument(
                "--into",
                "FOLDER",
                "keep FOLDER/model.safetensors up to date: always one version, whole and verified",
            ),
            argument("--count", "N", "exit after N versions (default: never)", type=count),
            JSON,
        ),
        examples={
            "holdfast weights follow s3://bucket/policy": "watch a trainer",
            "holdfast weights follow s3://bucket/policy --into /models/policy": (
                "for a server that reads safetensors"
            ),
        },
        statuses={0: "N versions were printed"},
    ),
    Command(
        "weights push",
        "publish the weights in files or in a checkpoint as the next version",
        more="It is stored whole, as an anchor. Names of tensors in files are published below "
        "`model`. The weights must fit in host memory, twice for files.",
        runs="weights:push",
        needs=("torch", "zstandard"),
        arguments=(
            CHANNEL,
            argument("source", "SRC", "a checkpoint, or what `holdfast import` reads"),
            argument(
                "--as",
                "VERSION",
                "number of the version, greater than all before (default: the step of the "
                "checkpoint, or the next number)",
                type=count,
                dest="number",
            ),
            argument(
                "--only",
                "NAME",
                "publish only this part of the checkpoint, as `model`; of files, only tensors of "
                "these names, may be given several times",
                action="append",
                default=[],
            ),
            JSON,
        ),
        examples={
            "holdfast weights push s3://bucket/policy /models/base": "a folder of safetensors",
            "holdfast weights push s3://bucket/policy run/step-500 --only model": (
                "the model in a checkpoint"
            ),
        },
        statuses={0: "the version is published"},
    ),
    Command(
        "weights pull",
        "write a version to a folder: as safetensors files, or as a checkpoint",
        more="Every byte is verified. Names leave out the key of the state, such as `model`, if "
        "all weights are below one key and there is no --rename.",
        runs="weights:pull",
        needs=("zstandard",),
        arguments=(
            CHANNEL,
            argument("dest", "DEST", "the folder to write"),
            VERSION,
            argument("--checkpoint", None, "write a checkpoint, in the layout of the trainer"),
            ONLY,
            RENAME,
            argument("--overwrite", None, "replace an earlier model, or another checkpoint"),
            JSON,
        ),
        examples={
            "holdfast weights pull s3://bucket/policy /models/policy": "the newest version",
            "holdfast weights pull s3://bucket/policy s3://bucket/best 120 --checkpoint": (
                "keep version 120 as a checkpoint"
            ),
        },
        statuses={0: "the version was written"},
    ),
)
