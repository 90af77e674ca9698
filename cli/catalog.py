"""Every command, with its arguments, examples and exit statuses. The help and the reference are
made from these.

Loaded at every start of the command line, so it is data and imports nothing slow.
"""

from __future__ import annotations

from .bench.arguments import GROUPS
from .commands import JSON, ONLY, RENAME, Command, argument, count, size
from .weights_catalog import WEIGHTS

COMMANDS: tuple[Command, ...] = (
    Command(
        "ls",
        "list the checkpoints at and below URI",
        arguments=(
            argument("uri", "URI", "a checkpoint, or a folder with checkpoints below it"),
            argument(
                "--last",
                "N",
                "show only the N checkpoints stored last, and read only their manifests",
                type=count,
            ),
            JSON,
        ),
        examples={
            "holdfast ls s3://bucket/run": "all checkpoints of a run",
            "holdfast ls s3://bucket/run --last 5": "the five stored last",
            "holdfast ls /checkpoints --json": "the same as JSON, for a program",
        },
        statuses={0: "there are checkpoints", 1: "there are none"},
    ),
    Command(
        "du",
        "show the space of checkpoints that share files, each file once",
        arguments=(
            argument("uri", "URI", "a folder with checkpoints below it, or a checkpoint"),
            JSON,
        ),
        examples={"holdfast du /checkpoints/run": "which step takes the space, and who needs it"},
        statuses={0: "there are checkpoints", 1: "there are none"},
    ),
    Command(
        "show",
        "show the state in a checkpoint as a tree: tensors with layouts, and small values",
        arguments=(
            argument("uri", "URI", "a checkpoint"),
            argument("--values", None, "print small values in full"),
            argument(
                "--depth",
                "N",
                "summarise everything deeper than N levels; --json prints everything",
                type=count,
            ),
            JSON,
        ),
        examples={
            "holdfast show /checkpoints/step-500": "every tensor, with its layout",
            "holdfast show s3://bucket/run/step-500 --depth 2": "a summary of two levels",
        },
        statuses={0: "the checkpoint was shown"},
    ),
    Command(
        "verify",
        "read every byte of a checkpoint, or of all below a folder, and check it",
        arguments=(
            argument("uri", "URI", "a checkpoint, or a folder with checkpoints below it"),
            JSON,
        ),
        examples={
            "holdfast verify s3://bucket/run/step-500": "read and check every byte",
            "holdfast verify /checkpoints/run": "every checkpoint; shared damage is named once",
        },
        statuses={0: "every byte is what was written", 1: "something is damaged"},
    ),
    Command(
        "diff",
        "compare two checkpoints: names, shapes, dtypes and values, whatever their layouts",
        arguments=(
            argument("a", "A", "a checkpoint"),
            argument("b", "B", "another checkpoint"),
            JSON,
        ),
        examples={"holdfast diff /run/step-500 s3://bucket/run/step-500": "is a copy the same?"},
        statuses={0: "both hold the same state", 1: "they differ"},
    ),
    Command(
        "cp",
        "copy a checkpoint to another URI, and verify it on the way",
        more="After an interruption, the same command continues where it stopped.",
        arguments=(
            argument(
                "src", "SRC", "a checkpoint; with --recursive, a folder with checkpoints below it"
            ),
            argument(
                "dst", "DST", "the URI of the copy; with --recursive, of the folder for copies"
            ),
            argument("--recursive", None, "copy every checkpoint at and below SRC", short="-r"),
            argument("--overwrite", None, "replace other checkpoints, and repair damaged ones"),
            argument(
                "--layout",
                "SIZE",
                "rewrite the images: whole tensors, in order, in files of about SIZE, such as 4GiB",
                type=size,
            ),
            argument(
                "--base",
                "URI",
                "an earlier checkpoint on the storage of DST, which copies or links equal bytes",
            ),
            JSON,
        ),
        examples={
            "holdfast cp /nvme/run/step-500 s3://bucket/run/step-500": "one checkpoint",
            "holdfast cp --recursive /nvme/run s3://bucket/run": "all checkpoints missing there",
            "holdfast cp run/step-9 s3://b/run/step-9 --base s3://b/run/step-8": "what differs",
            "holdfast cp --layout 4GiB run/step-500 /models/served": "large files, for a server",
        },
        statuses={0: "everything was copied", 1: "with --recursive: a checkpoint was damaged"},
    ),
    Command(
        "compact",
        "rewrite a checkpoint in place, so that it shares no file with others",
        more="The checkpoint stays readable meanwhile. After an interruption, the same command "
        "continues where it stopped.",
        runs="cp:run_compact",
        arguments=(argument("uri", "URI", "a checkpoint"), JSON),
        examples={"holdfast compact /checkpoints/run/step-500": "make it whole"},
        statuses={0: "the checkpoint shares no file"},
    ),
    Command(
        "export",
        "export a checkpoint for Hugging Face, safetensors, torch.load or DCP",
        more="A * in a name stands for any text. OLD matches whole names.",
        runs="conversion:run_export",
        arguments=(
            argument("uri", "CKPT", "a checkpoint"),
            argument("dest", "DEST", "the URI of a folder; for safetensors and torch, of a file"),
            argument(
                "--format",
                None,
                "safetensors files in Hugging Face's layout (default), one such file, a "
                "torch.save file, or a folder of torch.distributed.checkpoint",
                default="hf",
                choices=("hf", "safetensors", "torch", "dcp"),
            ),
            argument("--dtype", "DTYPE", "convert floating-point tensors: bf16, fp16, fp32, fp64"),
            ONLY,
            RENAME,
            argument(
                "--shard",
                "SIZE",
                "limit of the size of a file, such as 500MB or 2GiB (default: 5GB)",
                type=size,
                default=5_000_000_000,
            ),
            argument("--overwrite", None, "replace an earlier export"),
            JSON,
        ),
        examples={
            "holdfast export run/step-500 /models/new --only model --rename 'model.*=*'": (
                "the weights, for Hugging Face's libraries"
            ),
            "holdfast export /run/step-500 /models/new.pt --format torch --dtype bf16": (
                "one file for torch.load"
            ),
        },
        statuses={0: "the files were written"},
    ),
    Command(
        "import",
        "make a checkpoint from files of other programs",
        more="A * in a name stands for any text. OLD matches whole names.",
        runs="conversion:run_import",
        arguments=(
            argument(
                "source",
                "SRC",
                "a safetensors file, a folder of them, a .pt file, or a folder of DCP, "
                "Megatron or DeepSpeed; any URI",
            ),
            argument("uri", "DEST", "the URI of the checkpoint"),
            ONLY,
            RENAME,
            argument(
                "--skip",
                "NAME",
                "skip this item and those below it, such as optim; may be given several times",
                action="append",
                default=[],
            ),
            argument("--step", "N", "the step to record", type=count),
            argument("--overwrite", None, "replace another checkpoint"),
            JSON,
        ),
        examples={
            "holdfast import /models/base s3://bucket/base": "a folder of safetensors files",
            "holdfast import old.pt /run/step-0 --only model --step 0": (
                "the weights in a file of torch.save"
            ),
        },
        statuses={0: "the checkpoint was written"},
    ),
    Command(
        "prune",
        "delete checkpoints that no rule keeps, and leftovers of dead saves",
        more="Without a --keep option or --abandoned it deletes no checkpoint, and it never "
        "deletes the only whole one of a folder.",
        arguments=(
            argument("uri", "URI", "a folder with checkpoints below it"),
            argument("--keep-last", "N", "keep the N highest steps of each folder", type=count),
            argument("--keep-every", "N", "keep steps that are a multiple of N", type=count),
            argument("--abandoned", None, "also delete checkpoints that training went back before"),
            argument(
                "--verify", None, "read every byte of the kept checkpoints before deleting any"
            ),
            argument(
                "--idle-hours",
                "H",
                "an unfinished save without a write for this long is dead (default: 24)",
                default=24.0,
            ),
            argument("--dry-run", None, "print what would be deleted, and delete nothing"),
            argument("--yes", None, "do not ask for confirmation", short="-y"),
            JSON,
        ),
        examples={
            "holdfast prune /run --keep-last 3 --dry-run": "what would be deleted?",
            "holdfast prune /run --keep-last 3 --keep-every 1000 --yes": (
                "keep the newest three, and every thousandth step"
            ),
        },
        statuses={
            0: "checkpoints were deleted, or there was nothing to delete",
            1: "you answered no, or a folder could not be pruned",
        },
    ),
    Command(
        "report",
        "show where a save spent its time, and which ranks delayed the others",
        more="For a folder of checkpoints, it shows a line for each save.",
        arguments=(
            argument("uri", "URI", "a checkpoint, or a folder with checkpoints below it"),
            argument("--html", "FILE", "also write the report as an HTML page with charts"),
            argument("--trace", "FILE", "also write a trace for ui.perfetto.dev"),
            argument(
                "--bench",
                "FILE",
                "compare rates with a result of `holdfast bench --json` for the same storage",
            ),
            JSON,
        ),
        examples={
            "holdfast report s3://bucket/run/step-500": "which rank was slow, and why",
            "holdfast report s3://bucket/run --html report.html": "all saves, with charts",
        },
        statuses={0: "the saves were shown", 1: "there is no telemetry"},
    ),
    Command(
        "bench",
        "measure checkpoints on a storage, next to what a bare client reaches",
        more="`holdfast bench compare A.json B.json` compares two results.",
        runs="bench.command:run",
        arguments=(
            argument(
                "targets",
                "URI",
                "a folder or bucket to measure in; all data written there is deleted. Or: "
                "compare A.json B.json",
                nargs="+",
            ),
            JSON,
        ),
        groups=GROUPS,
        examples={
            "holdfast bench /scratch/bench --size 8GiB": "measure a file system",
            "holdfast bench s3://bucket/x --peer all --html a.html": "compare with other libraries",
            "holdfast bench s3://bucket/x --ranks 8": "measure with eight processes",
            "holdfast bench s3://bucket/x --tune": "find the best options, and keep them",
            "holdfast bench /scratch/bench --workload raw": "the driver, without checkpoints",
            "holdfast bench s3://bucket/x --workload llama3-1t --simulate": (
                "plan a job of 1,024 ranks"
            ),
            "holdfast bench compare before.json after.json": "did it become slower?",
        },
        statuses={
            0: "the result is valid; for compare: nothing became slower",
            1: "the result is invalid; for compare: something became slower",
        },
    ),
    Command(
        "keeper",
        "manage keepers, which hold checkpoints in host memory",
        more="`holdfast keeper COMMAND --help` describes each command.",
        examples={"holdfast keeper status": "what the keepers of this host hold"},
        statuses={0: "success"},
    ),
    Command(
        "keeper run",
        "run the keeper of a run on this host",
        more="Runs in the foreground until SIGTERM, Ctrl-C or `holdfast keeper stop`, or until "
        "it has been idle for --linger. A Checkpointer with keeper= starts one on its "
        "own.",
        runs="keeper.processes:run",
        arguments=(
            argument("uri", "URI", "folder of the run, as given to its Checkpointer"),
            argument("--memory", "SIZE", "limit of all images (default: what the host can spare)"),
            argument("--domain", "NAME", "failure domain (default: the host's name)"),
            argument(
                "--linger",
                "TIME",
                "exit after this time without a trainer (default: 1h)",
                default="1h",
            ),
            argument(
                "--local",
                "FOLDER",
                "folder on storage of this host, such as NVMe, to write to as well",
            ),
            argument("--local-every", "N", "write there every N steps (default: 1)", default=1),
            argument(
                "--serve",
                "WHERE",
                "serve the memory over HTTP, for peer://, at an interface or address, with "
                "an optional port: eth0:7070",
            ),
            argument(
                "--certificate",
                "FILE",
                "certificate of the server, for TLS; with --key",
                default="",
            ),
            argument("--key", "FILE", "private key of the certificate", default=""),
            argument("--max-bytes-per-s", "RATE", "limit of reads from other keepers, such as 1GB"),
            argument("--cpus", "LIST", "CPUs to run on, such as 0-3,8 (default: any)"),
            argument("--history", "N", "older steps to keep, if memory suffices", default=0),
            argument("--every", "N", "distance of kept steps (default: 1)", default=1),
            argument(
                "--spare-of",
                "ADDRESSES",
                "keepers of a job, as host:port,…; this one rebuilds what they lose",
            ),
        ),
        examples={
            "holdfast keeper run s3://bucket/run --memory 200GiB": "run the keeper of a run",
            "holdfast keeper run /run --local /nvme/keepers --local-every 50": (
                "also survive a reboot"
            ),
        },
        statuses={0: "the keeper has exited", 1: "another keeper of the run is alive"},
    ),
    Command(
        "keeper status",
        "show what the keepers of this host hold",
        more="Succeeds even if there is none.",
        runs="keeper.processes:status",
        arguments=(
            argument("uri", "URI", "the folder of one run", nargs="?"),
            argument("--watch", None, "refresh every second, until interrupted"),
            JSON,
        ),
        examples={
            "holdfast keeper status": "all keepers of this user",
            "holdfast keeper status s3://bucket/run --watch": "one keeper, every second",
        },
        statuses={0: "success, also if there is no keeper"},
    ),
    Command(
        "keeper upgrade",
        "replace the keepers of this host after an upgrade of Holdfast, with their memory",
        more="A new process takes over the images and options of each keeper that a Checkpointer "
        "has started. Have the service manager restart the others. Training may go on if both "
        "versions of Holdfast understand each other; otherwise end it first.",
        runs="keeper.processes:upgrade",
        arguments=(argument("uri", "URI", "the folder of one run", nargs="?"),),
        examples={"holdfast keeper upgrade": "all keepers of this user"},
        statuses={0: "all are replaced", 1: "one was not replaced, or there was none"},
    ),
    Command(
        "keeper stop",
        "stop the keepers of this host",
        more="They finish writing to storage, and release their memory.",
        runs="keeper.processes:stop",
        arguments=(argument("uri", "URI", "the folder of one run", nargs="?"),),
        examples={"holdfast keeper stop": "stop all keepers of this user, and free the memory"},
        statuses={0: "the keepers stop", 1: "there was no keeper"},
    ),
    Command(
        "keeper periods",
        "print how often to save to each level of storage",
        more="Minimizes the total time of saves and of the work that failures undo (Young "
        "1974, Daly 2006).",
        runs="keeper.periods:periods",
        arguments=(
            argument("--step", "TIME", "duration of a training step: 800ms, 2s", required=True),
            argument(
                "--cost",
                "LEVEL=TIME",
                "training time that one save to this level takes: memory=20ms; once for "
                "each level, from the fastest to the slowest",
                action="append",
                required=True,
            ),
            argument(
                "--rate",
                "LEVEL=N/TIME",
                "rate of the failures that this level is the fastest to survive: memory=1/2h",
                action="append",
                required=True,
            ),
            JSON,
        ),
        examples={
            "holdfast keeper periods --step 2s --cost memory=20ms --rate memory=1/2h": (
                "how often to save to memory"
            ),
            "holdfast keeper periods --step 2s --cost remote=8s --rate remote=1/168h": (
                "how often to save to storage"
            ),
        },
        statuses={0: "the periods were computed"},
    ),
    Command(
        "keeper demo",
        "let hosts fail in training, and see what each next job resumes from",
        more="Runs four hosts of one rank each on this machine. Takes about two minutes.",
        runs="demo.keepers:main",
        needs=("aiohttp", "rich"),
        arguments=(
            argument("uri", "URI", "folder to save below (default: a folder in /tmp)", nargs="?"),
        ),
        examples={
            "holdfast keeper demo": "with storage in a temporary folder",
            "holdfast keeper demo s3://bucket/demo": "on your storage",
        },
        statuses={0: "every job resumed as expected", 1: "a loss or a step was wrong"},
    ),
    *WEIGHTS,
    Command(
        "drivers",
        "list the available storages, or show the traits and options of one, with the source "
        "of each option",
        arguments=(
            argument("scheme", "SCHEME", "a scheme such as s3, or a URI", nargs="?"),
            argument(
                "--check",
                None,
                "test whether the storage at a URI is fit for checkpoints, in a scratch "
                "folder that is removed",
            ),
            JSON,
        ),
        examples={
            "holdfast drivers": "the available storages",
            "holdfast drivers s3://bucket/run": "its options, with their sources",
            "holdfast drivers --check s3://bucket/run": "is it fit for checkpoints?",
        },
        statuses={
            0: "the storage can be used",
            1: "SCHEME cannot be used here, or --check found a problem",
        },
    ),
    Command(
        "demo",
        "train, kill a rank during a save, resume with fewer ranks, and compare",
        more="It takes about a minute.",
        runs="demo.run:main",
        needs=("matplotlib", "rich"),
        arguments=(
            argument("uri", "URI", "store the checkpoints below it (default: in --out)", nargs="?"),
            argument(
                "--out",
                "X",
                "folder for logs and pictures; emptied first (default: demo-run)",
                default="demo-run",
            ),
            argument("--steps", "X", "number of training steps (default: 40)", default=40),
            argument("--ranks-before", "X", "ranks before the kill (default: 4)", default=4),
            argument("--ranks-after", "X", "ranks after the kill (default: 2)", default=2),
            argument(
                "--incremental",
                None,
                "instead fine-tune with LoRA, save whole and incrementally, delete a checkpoint, "
                "and resume",
            ),
            argument(
                "--weights",
                None,
                "instead publish the weights of a trainer to two engines, kill an engine and the "
                "trainer, and compare",
            ),
        ),
        examples={
            "holdfast demo": "four ranks, then two",
            "holdfast demo --incremental": "bytes, seconds and space of incremental saves",
            "holdfast demo --weights": "versions of weights, from a trainer to engines",
            "holdfast demo s3://bucket/demo --ranks-after 1": "on your storage",
        },
        statuses={
            0: "training continued as without the interruption",
            1: "it did not, or a checkpoint is damaged",
        },
    ),
)
