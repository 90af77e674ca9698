"""The options of ``holdfast bench``.

Names of models, peers and workloads are checked on use.
"""

from __future__ import annotations

from ..commands import argument, counts, duration, share, size, sizes

GROUPS = {
    "workload": (
        argument("--size", "SIZE", "approximate size of the state (default: 1GiB)", type=size),
        argument("--tensors", "N", "with --size: this many equal tensors", type=int),
        argument(
            "--workload",
            "NAME",
            "a checkpoint of MLPerf Storage: llama3-8b, llama3-70b, llama3-405b or "
            "llama3-1t; changes of the state before incremental saves: lora, partial, moe, "
            "sparse-table, nothing or everything; or raw: the driver without checkpoints, over a "
            "grid of part size × concurrency",
        ),
        argument(
            "--model", "NAME", "the real tensors of a model: llama3-8b, llama3-70b or llama3-405b"
        ),
        argument(
            "--optimizer",
            "KIND",
            "with --model: optimizer state: none, adam or adam+master (default: none)",
        ),
        argument("--layers", "N", "with --model: its first N layers only", type=int),
        argument(
            "--index", "PATH", "the tensors of safetensors files: a folder, its index, or a file"
        ),
        argument(
            "--entropy",
            "WHAT",
            "content of tensors: normal, uniform, or the random share among zeros, such "
            "as 25%% (default: %(default)s)",
            default="normal",
        ),
    ),
    "measurement": (
        argument(
            "--runs", "N", "rounds (default: 5; for checkpoints of MLPerf Storage: 10)", type=int
        ),
        argument(
            "--time-limit",
            "TIME",
            "start no new round after this time, such as 90s or 10min; with --tune: "
            "approximate total time (default: 60s)",
            type=duration,
        ),
        argument(
            "--ranks",
            "N",
            "number of processes on this host (default: 1); under torchrun or mpirun, "
            "the ranks of the job measure. With --simulate: ranks of the job (default: "
            "those of the --workload)",
            type=int,
        ),
        argument(
            "--compression", "CODEC", "compression of saves: lz4 (default: none)", choices=("lz4",)
        ),
    ),
    "comparison": (
        argument(
            "--peer",
            "NAMES",
            "also measure these, separated by commas: dcp, dcp4, holdfast-dcp, torchsave, "
            "safetensors, torchsnapshot; all: every one that is installed and supports the storage",
            default="",
        ),
        argument(
            "--driver-alone",
            None,
            "also measure Holdfast's driver without the engine, to tell their costs apart",
        ),
    ),
    "output": (
        argument(
            "--slower",
            "PART",
            "for compare: how much slower B may be (default: 5%%)",
            type=share,
            default=0.05,
        ),
        argument("--html", "FILE", "also write the result as an HTML page"),
    ),
    "driver alone": (
        argument(
            "--part-sizes",
            "SIZE,…",
            "for raw, such as 4MiB,16MiB (default: around the driver's preference)",
            type=sizes,
        ),
        argument(
            "--concurrencies",
            "N,…",
            "for raw, such as 1,8,32 (default: around the driver's preference)",
            type=counts,
        ),
    ),
    "tuning": (
        argument(
            "--tune",
            None,
            "find the options with which saves and loads are fastest, and keep them as "
            "a profile in your configuration if they are faster than the defaults",
        ),
        argument("--only-show", None, "with --tune: print the result, and keep no profile"),
        argument("--forget", None, "remove the profile that --tune has kept"),
    ),
    "simulation": (
        argument(
            "--simulate",
            None,
            "plan a save and a load of all ranks of a job in this process, without data",
        ),
        argument("--ranks-per-host", "N", "for --simulate (default: %(default)s)", default=8),
    ),
}
