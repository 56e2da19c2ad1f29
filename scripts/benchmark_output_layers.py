#!/usr/bin/env python3
"""Time and peak memory of a training step (loss, and its gradients) of each output layer, against plain softmax.

    python scripts/benchmark_output_layers.py --shapes ptb --threads 2 --out ptb.csv
    python scripts/benchmark_output_layers.py --device cuda --dtype bfloat16 --tokens 4096

The layers take turns, a round after a warm-up, so that a busy machine is busy for all of them: the ratios of their
medians hold better than the times. Softmax has no projection: its features are E wide, those of the others D.
Ratios are to softmax; FLOPs are those of the matrix products, and "paper" is the time of the output layer in tables 3
to 5 of the Mixtape paper. Memory is the peak beyond that of a step on 16 tokens: without weights and their gradients,
on a CPU in a fresh process for each layer. A layer that would not fit in memory is skipped, and says so.
"""

import argparse
import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from tqdm import tqdm  # noqa: E402

from mixtape_plugin.analysis.benchmark import (  # noqa: E402
    COLUMNS,
    LAYERS,
    SHAPES,
    TINY,
    Setting,
    Shape,
    benchmark,
    build_layer,
)
from mixtape_plugin.analysis.files import write_csv  # noqa: E402
from mixtape_plugin.errors import UserError  # noqa: E402


def parse_shape(text: str) -> Shape:
    """A name of SHAPES, or V:E:D:K:r:N."""
    if text in SHAPES:
        return SHAPES[text]
    try:
        v, e, d, k, r, n = text.split(":")
        shape = Shape(text, int(v), int(e), int(d), int(k), float(r), int(n))
    except ValueError:
        raise UserError(
            f"--shapes {text} is none of {', '.join(SHAPES)}, and no V:E:D:K:r:N such as 1000:16:24:3:0.1:64"
        ) from None
    if min(shape.vocab_size, shape.embed_dim, shape.feature_dim) < 1:
        raise UserError(f"--shapes {text} has a V, E or D that is not allowed: at least 1")
    return shape


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=["ptb", "one-billion", "en-de"],
        metavar="SHAPE",
        help=f"of {', '.join(SHAPES)}, or V:E:D:K:r:N (vocabulary, embedding, features, components of MoS and MoC, "
        "share of frequent tokens, tokens a step); default: %(default)s",
    )
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=LAYERS, help="softmax always runs; default: all")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="after the warm-up; default: %(default)s")
    parser.add_argument("--threads", type=int, metavar="N", help="of the CPU; default: what torch would use")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16", "float64"], default="float32")
    parser.add_argument("--tokens", type=int, metavar="N", help="tokens a step, instead of the shapes' own")
    parser.add_argument("--noise", action="store_true", help="with the papers' gate noise and dropout (default: none)")
    parser.add_argument("--memory-limit", type=float, metavar="GB", help="skip what needs more; default: what is free")
    parser.add_argument("--out", metavar="FILE", help="also write the table as CSV")
    args = parser.parse_args(argv)

    args.threads = torch.get_num_threads() if args.threads is None else args.threads
    args.layers = [layer for layer in LAYERS if layer in args.layers or layer == "softmax"]
    shapes = [parse_shape(text) for text in args.shapes]
    args.shapes = [shape._replace(tokens=args.tokens or shape.tokens) for shape in shapes]
    for name, least in (("rounds", 1), ("threads", 1), ("tokens", TINY + 1), ("memory_limit", 0)):
        value = getattr(args, name)
        if value is not None and not value >= least:
            raise UserError(f"--{name.replace('_', '-')} {value} is not allowed: at least {least}")
    for shape in args.shapes:
        if shape.tokens <= TINY:
            raise UserError(f"--shapes {shape.shape} has too few tokens: at least {TINY + 1}")
        for layer in args.layers:
            try:
                build_layer(layer, shape._replace(embed_dim=1, feature_dim=1))
            except UserError as error:  # of K or r
                raise UserError(f"--shapes {shape.shape}: {error}") from None
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda is not allowed here: torch finds no GPU")
    if args.device == "cpu" and args.dtype == "float16":
        raise UserError("--dtype float16 is not allowed with --device cpu: bfloat16, float32 or float64")
    if args.out and not os.access(os.path.dirname(os.path.abspath(args.out)), os.W_OK):
        raise UserError(f"--out {args.out} cannot be written: its folder is missing or read-only")
    return args


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


def provenance(args) -> dict:
    """What the numbers depend on besides the layers: columns of the CSV, and the line above the table."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "machine": torch.cuda.get_device_name() if args.device == "cuda" else cpu_model(),
        "cores": cores,
        "threads": args.threads,
        "load_before": round(os.getloadavg()[0], 2),
        "dtype": args.dtype,
        "noise": args.noise,
        "rounds": args.rounds,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "plugin": plugin_version(),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def markdown(rows, facts) -> str:
    """The rows as a table."""
    lines = [
        ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in facts.items()),
        "",
        "| shape | layer | N | ms, median (min–max) | time ratio | FLOP ratio | paper | memory, MB | parameters |",
        "| --- | --- | --: | --: | --: | --: | --: | --: | --: |",
    ]

    def number(value, form):
        return "–" if value is None else format(value, form)

    for row in rows:
        milliseconds = row["skipped"] or "{ms_median:.1f} ({ms_min:.1f}–{ms_max:.1f})".format(**row)
        label = f"{row['layer']}-{row['num_components']}" if row["layer"] in ("moc", "mos") else row["layer"]
        cells = [row["shape"], label, str(row["tokens"]), milliseconds]
        cells += [number(row[name], ".2f") for name in ("time_ratio", "flop_ratio", "paper_ratio")]
        cells += [number(row["peak_memory_mb"], ".0f"), number(row["parameters"], ",")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write_rows(path: str, rows, facts) -> None:
    """One line for each row, with the facts of the run; the file appears whole or not at all."""
    write_csv(path, [*COLUMNS, *facts], ({**row, **facts} for row in rows))


def main(argv=None):
    try:
        args = parse(argv)
    except UserError as error:
        sys.exit(f"benchmark_output_layers.py: {error}")
    # for the processes that memory is measured in
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    facts = provenance(args)
    setting = Setting(args.device, args.dtype, args.threads, args.noise)
    limit = None if args.memory_limit is None else args.memory_limit * 1e9
    rows = []
    with tqdm(total=len(args.shapes) * len(args.layers) * (args.rounds + 2), unit="step") as bar:
        for shape in args.shapes:
            bar.set_description(shape.shape)
            rows += benchmark(shape, args.layers, setting, args.rounds, limit, bar.update)
    print(markdown(rows, facts))
    if args.out:
        try:
            write_rows(args.out, rows, facts)
        except OSError as error:
            sys.exit(f"benchmark_output_layers.py: --out {args.out} cannot be written: {error.strerror}")


if __name__ == "__main__":
    main()
