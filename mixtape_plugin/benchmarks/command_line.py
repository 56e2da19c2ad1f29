"""What the command lines of the benchmarks share: options, the facts that numbers depend on, cells of their tables."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import platform
import subprocess
from typing import Callable, Iterable, Sequence

import torch

from mixtape_plugin import files
from mixtape_plugin.benchmarks.measuring import ROOT, Budget, available_memory
from mixtape_plugin.drawing import check_picture
from mixtape_plugin.errors import UserError, check_least
from mixtape_plugin.files import check_outputs, check_place, write_csv
from mixtape_plugin.tables import table

LARGEST_BATCH = 16  # times a shape's own


def add_common_options(
    parser: argparse.ArgumentParser, impls: Sequence[str], default_impls: str, default_smoothing: str
) -> None:
    """The options of both, `impls` the choices of ``--impls``, and what the help says of two defaults."""
    parser.add_argument(
        "--impls",
        nargs="+",
        choices=impls,
        metavar="IMPL",
        help=f"of {', '.join(impls)}; the plain softmax always runs; default: {default_impls}",
    )
    parser.add_argument("--label-smoothing", type=float, metavar="E", help=f"default: {default_smoothing}")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="after the warm-up; default: %(default)s")
    parser.add_argument("--threads", type=int, metavar="N", help="of the CPU; default: what torch would use")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--memory-limit", type=float, metavar="GB", help="skip what needs more; default: what is free")
    parser.add_argument("--memory-budget", type=float, metavar="GB", help="also compare at the largest batch that fits")
    parser.add_argument(
        "--largest-batch",
        type=int,
        metavar="N",
        help=f"end the search for that batch at N times the batch of the shape; default: {LARGEST_BATCH}",
    )
    parser.add_argument("--out", metavar="FILE", help="also write the table as CSV")


def check_common_options(args: argparse.Namespace, **least) -> None:
    """Raises UserError for the first that is not allowed, and fills in the defaults that depend on the machine.

    Args:
        least: the smallest values of the script's own options.
    """
    args.threads = torch.get_num_threads() if args.threads is None else args.threads
    check_least(args, **{"rounds": 1, "threads": 1, "memory_limit": 0, "largest_batch": 1, **least})
    if args.largest_batch is None:
        args.largest_batch = LARGEST_BATCH
    elif args.memory_budget is None:
        raise UserError(f"--largest-batch {args.largest_batch} needs --memory-budget")
    if args.label_smoothing is not None and not 0 <= args.label_smoothing < 1:
        raise UserError(f"--label-smoothing {args.label_smoothing} is not allowed: from 0 to less than 1")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda is not allowed here: torch finds no GPU")
    free = available_memory(args.device) / 1e9
    if args.memory_budget is not None and not 0 < args.memory_budget <= free:
        raise UserError(f"--memory-budget {args.memory_budget} is not allowed: more than 0 and at most {free:.3g}")
    outputs = {"--out": args.out, "--plot": args.plot}
    check_outputs(outputs)
    for option, path in outputs.items():
        if path is not None:
            check_place(option, path)
    check_picture("--plot", args.plot)


def settings_of_memory(args: argparse.Namespace) -> tuple:
    """Bytes of --memory-limit, and the budgets to run at: none, which is one batch size, and --memory-budget."""
    limit = None if args.memory_limit is None else args.memory_limit * 1e9
    budget = None if args.memory_budget is None else Budget(args.memory_budget * 1e9, args.largest_batch)
    return limit, [None, budget] if budget else [None]


def cpu_model() -> str:
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":")[1].strip()
    return platform.processor() or platform.machine()


def commit() -> str:
    """The git commit of this checkout, `dirty` where the code differs from it."""
    if not (ROOT / ".git").exists():
        return "unknown"
    git = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        code = [*git, "status", "--porcelain", "--", "mixtape_plugin", "scripts"]
        changed = subprocess.run(code, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + (" dirty" if changed else "")


def plugin_version() -> str:
    try:
        return importlib.metadata.version("mixtape_plugin")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def provenance(args: argparse.Namespace, **setting) -> dict:
    """What the numbers depend on besides the layers, `setting` too: columns of the CSV, the line above the table."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "machine": torch.cuda.get_device_name() if args.device == "cuda" else cpu_model(),
        "cores": cores,
        "threads": args.threads,
        "load_before": round(os.getloadavg()[0], 2),
        **setting,
        "rounds": args.rounds,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "plugin": plugin_version(),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def milliseconds(row: dict) -> str:
    return row["skipped"] or "{ms_median:.1f} ({ms_min:.1f}–{ms_max:.1f})".format(**row)


def at_least(row: dict, column: str) -> str:
    """The batch of a row; where more fits into its budget, it says so."""
    return ("≥ " if row["fits_more"] else "") + number(row[column], ",")


def markdown_table(facts: dict, names: Sequence[str], text_columns: int, rows: Iterable[Sequence[str]]) -> str:
    """The facts of a run and a table of its rows, which are lists of cells: after some columns of text, numbers."""
    above = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in facts.items())
    return f"{above}\n\n{table(names, rows, text_columns)}"


def write_outputs(
    args: argparse.Namespace,
    columns: Sequence[str],
    rows: Sequence[dict],
    facts: dict,
    draw: Callable[[str, Sequence[dict], dict], None],
) -> None:
    """Writes --out, a line for each row with the facts of the run, and --plot; raises UserError where one cannot be
    written."""
    files.write_outputs(
        ("--out", args.out, lambda path: write_csv(path, [*columns, *facts], ({**row, **facts} for row in rows))),
        ("--plot", args.plot, lambda path: draw(path, rows, facts)),
    )
