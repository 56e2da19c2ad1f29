#!/usr/bin/env python3
"""The softmax bottleneck in a minute: fit a random high-rank distribution with every output layer.

    python scripts/bottleneck.py

There are 1,024 contexts, and each has a distribution of its own over 512 tokens (Dirichlet, concentration .05). The
contexts' features are free parameters, so only the output layer stands between them and the truth. With embeddings of
E = 16 the log-probabilities of softmax and MoC have rank 18 at most; those of MoS and Mixtape have no such bound.

Prints a table and writes it (layers.csv), the divergence at every step (kl.csv), the singular values of log P
(singular_values.csv), and a drawing of both (bottleneck.png); the maps f of the layers p = softmax(f(z)), PLIF's as it
was learned (maps.csv, maps.png).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import start
import torch
from tqdm import tqdm

from mixtape_plugin.analysis.bottleneck import LAYERS, MAP_SCORES, Fit, fit, random_conditional
from mixtape_plugin.analysis.rank import press_rank, singular_values
from mixtape_plugin.drawing import pyplot, save
from mixtape_plugin.errors import UserError, check_least
from mixtape_plugin.files import make_folder, write_csv
from mixtape_plugin.tables import aligned

CONCENTRATION = 0.05
MAX_CELLS = 2**22
COLUMNS = ["layer", "KL from the truth (nats)", "rank of log P", "accuracy of the top token", "parameters", "seconds"]


def draw(path: Path, fits: dict[str, Fit], true_sigma: torch.Tensor, title: str) -> None:
    """KL against steps, and singular values of log P over the largest one."""
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)
    for name, result in fits.items():
        left.plot(range(len(result.curve)), result.curve, label=name)
        right.plot(range(1, len(result.sigma) + 1), result.sigma / result.sigma[0], label=f"{name}: {result.rank}")
    right.plot(range(1, len(true_sigma) + 1), true_sigma / true_sigma[0], "k:", label="truth")
    left.set(xlabel="step", ylabel="KL(P*‖P) in nats", title=title, ylim=(0, None))
    right.set(xlabel="index", ylabel="σ / σ_max", title="singular values of log P", yscale="log", xscale="log")
    left.legend(loc="lower left")
    right.legend(title="rank")
    save(figure, path)


def draw_maps(path: Path, maps: dict[str, torch.Tensor]) -> None:
    """f(z) of each map, and f(z) − z, which a softmax sees but for what is the same for all tokens."""
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)
    for name, values in maps.items():
        left.plot(MAP_SCORES, values, label=name)
        right.plot(MAP_SCORES, values - MAP_SCORES, label=name)
    left.plot(MAP_SCORES, MAP_SCORES, "k:", label="softmax: f(z) = z")
    right.axhline(0, color="k", linestyle=":")
    left.set(xlabel="score z", ylabel="f(z)", title="maps of the scores before the softmax")
    right.set(xlabel="score z", ylabel="f(z) − z", title="what they change")
    left.legend()
    save(figure, path)


def table(fits: dict[str, Fit]) -> str:
    rows = (
        [name, f"{fit.kl:.2f}", str(fit.rank), f"{fit.accuracy:.3f}", f"{fit.parameters:,}", f"{fit.seconds:.1f}"]
        for name, fit in fits.items()
    )
    return aligned([COLUMNS, *rows], text_columns=1)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="updates of each layer (default: %(default)s)")
    parser.add_argument("--contexts", type=int, default=1024, help="N (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=512, help="V (default: %(default)s)")
    parser.add_argument("--embed-dim", type=int, default=16, help="E; features are 4E wide (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="truth and initial values (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("bottleneck_run"), help="folder (default: %(default)s)")
    args = parser.parse_args(argv)
    check_least(args, steps=10, contexts=2, tokens=2, embed_dim=1, seed=0)
    if args.seed >= 2**63:
        raise UserError(f"--seed {args.seed} is not allowed: less than 2^63")
    if args.contexts * args.tokens > MAX_CELLS:
        raise UserError(
            f"--contexts {args.contexts} times --tokens {args.tokens} is too large for this: at most {MAX_CELLS:,}"
        )
    if args.embed_dim * max(args.contexts, args.tokens) > MAX_CELLS:
        raise UserError(
            f"--embed-dim {args.embed_dim} times the larger of --contexts and --tokens is too large for this: at most "
            f"{MAX_CELLS:,}"
        )
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    make_folder(args.out)

    truth = torch.from_numpy(
        random_conditional(args.contexts, args.tokens, CONCENTRATION, np.random.default_rng(args.seed))
    )
    entropy = torch.special.entr(truth.exp()).sum(-1).mean()
    fits = {}
    with tqdm(total=args.steps * len(LAYERS), unit="step", mininterval=0.5 if sys.stderr.isatty() else 10) as bar:
        for name, layer in LAYERS.items():
            bar.set_description(f"{name:<12}")
            fits[name] = fit(truth, layer, args.embed_dim, args.steps, args.seed, progress=bar.update)

    true_sigma = singular_values(truth)
    title = f"{args.contexts} contexts × {args.tokens} tokens, E = {args.embed_dim}"
    layers = [[name, f.kl, f.rank, f.accuracy, f.parameters, f.seconds] for name, f in fits.items()]
    curves = enumerate(zip(*(f.curve for f in fits.values())))
    sigmas = enumerate(zip(true_sigma.tolist(), *(f.sigma.tolist() for f in fits.values())), 1)
    maps = {name: f.map_ for name, f in fits.items() if f.map_ is not None}
    points = zip(MAP_SCORES.tolist(), *(values.tolist() for values in maps.values()))
    for name, columns, rows in (
        ("layers", COLUMNS, layers),
        ("kl", ["step", *fits], ([step, *row] for step, row in curves)),
        ("maps", ["z", *maps], points),
        ("singular_values", ["index", "truth", *fits], ([index, *row] for index, row in sigmas)),
    ):
        write_csv(args.out / f"{name}.csv", columns, (dict(zip(columns, row)) for row in rows))
    draw(args.out / "bottleneck.png", fits, true_sigma, title)
    draw_maps(args.out / "maps.png", maps)
    print(f"{title}; the truth has rank {press_rank(true_sigma, *truth.shape)} and an entropy of {entropy:.2f} nats\n")
    print(table(fits))
    print(f"\nDrawing and CSV files: {args.out}/")


if __name__ == "__main__":
    start.run(main)
