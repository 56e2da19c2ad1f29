#!/usr/bin/env python3
"""What trained models know, each from one walk through a text: of language models and of translation models.

    python scripts/analyze.py rank data-bin/ptb checkpoints/ptb.*
    python scripts/analyze.py predictions data-bin/ptb checkpoints/ptb.* --paper
    python scripts/analyze.py frequency data-bin/ptb checkpoints/ptb.softmax checkpoints/ptb.mixtape
    python scripts/analyze.py mixing data-bin/ptb checkpoints/ptb.mos checkpoints/ptb.mixtape
    python scripts/analyze.py similarity data-bin/ptb checkpoints/ptb.* --pairs eval-word-vectors

rank         the rank of log P, contexts by tokens, its effective ranks, its singular values, and the mean divergence
             between the predictions in two contexts
predictions  the likeliest words of each model at chosen positions, and how often the true one is among them
frequency    the perplexity of frequent and of rare words, and which of them two models' losses differ in
mixing       how many components of a mixture count, and how their context vectors lie, for frequent and rare words
similarity   Spearman's correlation of the embeddings' cosines with people's ratings of word pairs

DATA is what fairseq-preprocess wrote; each DIR a folder of train.sh, of which average.pt is read where evaluate.sh
made one, else checkpoint_best.pt. A translation model reads the true target up to each word (teacher forcing).

Prints Markdown; writes CSV files and a picture into --out. rank, predictions and similarity also leave rank.json,
predictions.json or similarity.json in each DIR, whose figures scripts/collect_results.py shows as columns.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Iterator, Sequence

import start
import torch

from mixtape_plugin.analysis import frequency, mixing, pictures, predictions, rank, word_similarity
from mixtape_plugin.analysis.divergence import PairwiseDivergence
from mixtape_plugin.analysis.trained_model import Text, find_checkpoint, load
from mixtape_plugin.benchmarks.measuring import available_memory
from mixtape_plugin.errors import UserError, check_least
from mixtape_plugin.evaluation.command_line import device, progress_bar
from mixtape_plugin.evaluation.language_model import Score
from mixtape_plugin.files import make_folder, write_csv, write_text
from mixtape_plugin.tables import table

EPSILONS = (1e-3, 1e-4, 1e-5)
LEAVE_NOTHING = ("frequency", "mixing")  # in the folders
RESERVE = 2**29  # bytes for the model and what it works with


# ------------------------------------------------------------------------------------------------------ rank


def estimate(contexts: int, tokens: int, where: str) -> None:
    """Says what the rank will take; raises UserError where it does not fit into memory."""
    need, free = rank.gram_bytes(contexts, tokens, where), available_memory(where) - RESERVE
    if need > free:
        fits = next((n for n in fitting(contexts) if rank.gram_bytes(n, tokens, where) <= free), 0)
        raise UserError(
            f"the rank of {contexts:,} contexts × {tokens:,} tokens takes {need / 1e9:.1f} GB for the Gram matrix, and "
            f"{max(free, 0) / 1e9:.1f} GB are free: " + (f"--contexts {fits} fits" if fits else "free some memory")
        )
    sums, eigenvalues = rank.gram_flops(contexts, tokens)  # the latter at about a third of the speed
    a = torch.rand(1024, 1024, dtype=torch.float64, device=where)
    a.mm(a).sum().item()  # the first call is slower
    start = time.perf_counter()
    a.mm(a).sum().item()
    minutes = (sums + 3 * eigenvalues) * (time.perf_counter() - start) / (2 * 1024**3) / 60
    print(
        f"{contexts:,} contexts × {tokens:,} tokens: {need / 1e9:.2g} GB, {sums + eigenvalues:.2g} floating-point "
        f"operations, about {f'{minutes:.0f}' if minutes >= 1 else 'one'} minute(s) at this machine's present speed "
        "beside the model's own",
        file=sys.stderr,
        flush=True,
    )


def fitting(contexts: int) -> list[int]:
    """1, 2 and 5 times powers of ten below a number, descending."""
    return sorted((m * 10**e for m in (1, 2, 5) for e in range(2, 10) if m * 10**e < contexts), reverse=True)


def analyze_rank(args: argparse.Namespace, folder: Path, name: str) -> tuple[dict, list[float]]:
    """The row of a table and the singular values of a folder's model."""
    start, where = time.perf_counter(), device(args)
    trained = load(folder, args.data, args.checkpoint, where)
    contexts, tokens = len(trained.read(args.subset)), trained.tokens
    if args.contexts and args.contexts > contexts:
        raise UserError(f"--contexts {args.contexts} is not allowed: the text has {contexts}")
    contexts = args.contexts or contexts
    estimate(contexts, tokens, where)
    gram, divergence, nll, seen = rank.Gram(contexts, tokens, where), PairwiseDivergence(), 0.0, 0
    with progress_bar(name, contexts) as bar:
        for log_probs, targets in trained.log_probs(args.subset, args.batch_size):
            log_probs, targets = log_probs[: contexts - seen], targets[: contexts - seen]
            nll -= log_probs.gather(-1, targets.unsqueeze(-1)).double().sum().item()
            log_probs = trained.possible(log_probs)
            gram.add(log_probs)
            divergence.add(log_probs)
            seen += len(targets)
            bar.update(len(targets))
            if seen == contexts:
                break
        checkpoint = trained.checkpoint.name
        del trained, log_probs
        bar.set_postfix_str("singular values")
        sigma = gram.singular_values()
    columns = {"rank": rank.press_rank(sigma, contexts, tokens)}
    columns.update(
        {f"rank {epsilon:.0e}".replace("e-0", "e-"): rank.effective_rank(sigma, epsilon) for epsilon in EPSILONS}
    )
    columns["KLD"] = divergence.mean()
    details = {
        "checkpoint": checkpoint, "subset": args.subset, "contexts": contexts, "tokens": tokens,
        "perplexity": Score(nll, contexts).perplexity, "seconds": round(time.perf_counter() - start, 1),
    }  # fmt: skip
    write_json(folder / "rank.json", {**details, "columns": columns})
    return {"training": name, **details, **columns}, sigma.tolist()


def run_rank(args: argparse.Namespace) -> None:
    rows, sigma = [], {}
    for folder, name in args.names.items():
        row, sigma[name] = analyze_rank(args, folder, name)
        rows.append(row)
    indices = range(max(map(len, sigma.values())))
    write_csv(args.out / "rank.csv", list(rows[0]), rows)
    write_csv(
        args.out / "singular_values.csv",
        ["index", *sigma],
        ({"index": i + 1, **{name: s[i] for name, s in sigma.items() if i < len(s)}} for i in indices),
    )
    marks = {row["training"]: (row["rank"], rank.press_threshold(row["contexts"], row["tokens"])) for row in rows}
    pictures.draw_singular_values(args.out / "rank.png", sigma, marks)
    shown = [key for key in rows[0] if key not in ("checkpoint", "subset", "seconds")]
    print(table(shown, ([text_of(row[key]) for key in shown] for row in rows)), end="")


# ----------------------------------------------------------------------------------------------- predictions


def models_of_one_text(args: argparse.Namespace) -> Iterator[tuple]:
    """Name, model and text of each folder, one after the other; raises UserError where two read different texts."""
    first = None
    for folder, name in args.names.items():
        trained = load(folder, args.data, args.checkpoint, device(args))
        text = trained.read(args.subset)
        first = first or text
        if not torch.equal(text.targets, first.targets):
            raise UserError(f"{folder} reads another text than the first folder: compare models of one text")
        yield name, trained, text


def run_predictions(args: argparse.Namespace) -> None:
    found = {}
    for name, trained, text in models_of_one_text(args):
        if not found:
            groups = chosen(args, text)  # a position that is not in the text, before anything takes time
            if args.top > trained.tokens:
                raise UserError(f"--top {args.top} is not allowed: at most {trained.tokens}, the tokens there are")
        with progress_bar(name, len(text)) as bar:
            found[name] = predictions.predict(trained, args.subset, args.top, bar.update)
    if args.search:
        first, second = (find_name(args, given) for given in args.search)
        title = f"{first} above {second}"
        groups[title] = predictions.where_better(found[first], found[second], args.search_count)
    groups = {title: positions for title, positions in groups.items() if positions}

    rates = predictions.hit_rates(found, text)
    for title, positions in groups.items():
        print(f"## {title}\n")
        for index in positions:
            print(predictions.side_by_side(found, text, index))
    print(table(list(rates[0]), ([text_of(value) for value in row.values()] for row in rates)), end="")
    print(f"\nOf all {len(text):,} positions, in percent: where the true word is the likeliest, among the {args.top}")
    print("likeliest, and among them where another model's does not have it.")

    write_csv(args.out / "hits.csv", list(rates[0]), rates)
    if groups:
        rows = list(predictions.rows(found, text, groups))
        write_csv(args.out / "predictions.csv", list(rows[0]), rows)
        right = {name: predictions.hits(p, text.targets).tolist() for name, p in found.items()}
        pictures.draw_hits(
            args.out / "predictions.png",
            {
                name: {title: [hit[i] for i in positions] for title, positions in groups.items()}
                for name, hit in right.items()
            },
            {title: [predictions.label_of(text, i) for i in positions] for title, positions in groups.items()},
            args.top,
        )
    for folder, row in zip(args.names, rates):
        columns = {key: value for key, value in row.items() if key.startswith("top-")}
        details = {"checkpoint": find_checkpoint(folder, args.checkpoint).name, "subset": args.subset}
        write_json(folder / "predictions.json", {**details, "perplexity": row["perplexity"], "columns": columns})


def chosen(args: argparse.Namespace, text: Text) -> dict:
    """Title -> positions, of those that need no model."""
    groups = predictions.paper_positions(text) if args.paper else {}
    groups["chosen"] = [predictions.index_of(text, position, "--at") for position in args.at]
    groups["random"] = predictions.random_positions(text, args.random, args.seed) if args.random else []
    return groups


def find_name(args: argparse.Namespace, given: str) -> str:
    names = [name for folder, name in args.names.items() if given in (name, folder.name) or Path(given) == folder]
    if len(names) != 1:
        how_many = "is several" if names else "is none"
        raise UserError(f"--search {given} {how_many} of the folders: {', '.join(args.names.values())}")
    return names[0]


# ------------------------------------------------------------------------------------------------- frequency


def run_frequency(args: argparse.Namespace) -> None:
    losses = {}
    for name, trained, text in models_of_one_text(args):
        with progress_bar(name, len(text)) as bar:
            losses[name] = -predictions.predict(trained, args.subset, 1, bar.update).target_log_probs
    rows = frequency.by_frequency(losses, text)
    write_csv(args.out / "frequency.csv", frequency.COLUMNS, rows)
    pictures.draw_frequency(args.out / "frequency.png", [row for row in rows if row["rank"] != frequency.ALL])
    print(frequency.markdown(rows), end="")


# ---------------------------------------------------------------------------------------------------- mixing


def run_mixing(args: argparse.Namespace) -> None:
    found, components = {}, {}
    for folder in args.names:  # a layer that mixes nothing, before anything takes time
        mixing.check_mixes(load(folder, args.data, args.checkpoint))
    for name, trained, text in models_of_one_text(args):
        with progress_bar(name, len(text)) as bar:
            found[name] = mixing.walk(trained, args.subset, bar.update)
        components[name] = trained.layer.num_components
    rows = mixing.by_frequency(found, components, text)
    write_csv(args.out / "mixing.csv", mixing.COLUMNS, rows)
    classes = [row for row in rows if row["rank"] != frequency.ALL]
    pictures.draw_mixing(args.out / "mixing.png", classes, mixing.MEASURES)
    print(mixing.markdown(rows), end="")


# ------------------------------------------------------------------------------------------------ similarity


def run_similarity(args: argparse.Namespace) -> None:
    sets, found = word_similarity.read_folder(args.pairs), {}
    for folder, name in args.names.items():
        trained = load(folder, args.data, args.checkpoint)
        decoder = trained.model.decoder
        embedding = (trained.layer.weight if args.embedding == "output" else decoder.embed_tokens.weight).detach()
        dictionary = trained.task.target_dictionary
        found[name] = {s: word_similarity.similarity(embedding, dictionary, pairs) for s, pairs in sets.items()}
        rho = {s: result.rho for s, result in found[name].items()}
        rated = [value for value in rho.values() if value is not None]
        details = {"checkpoint": trained.checkpoint.name, "embedding": args.embedding, "rho": rho}
        columns = {"similarity": sum(rated) / len(rated)} if rated else {}
        write_json(folder / "similarity.json", {**details, "columns": columns})
    rows = [
        {
            "set": s, "training": name, "pairs": result[s].pairs, "skipped": result[s].skipped, "rho": result[s].rho,
            "low": result[s].interval and result[s].interval[0], "high": result[s].interval and result[s].interval[1],
        }
        for s in sets
        for name, result in found.items()
    ]  # fmt: skip
    write_csv(args.out / "similarity.csv", list(rows[0]), rows)
    pictures.draw_similarity(args.out / "similarity.png", found)

    print(word_similarity.markdown(found), end="")


# ---------------------------------------------------------------------------------------------- command line


def text_of(value: object) -> str:
    """A value in a Markdown table."""
    if isinstance(value, float):
        return f"{value:,.3f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def write_json(path: Path, value: object) -> None:
    """Raises UserError where the folder cannot be written to."""
    try:
        write_text(path, json.dumps(value, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    runs = {
        "rank": run_rank, "predictions": run_predictions, "frequency": run_frequency, "mixing": run_mixing,
        "similarity": run_similarity,
    }  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True, metavar="|".join(runs))
    for name, function in runs.items():
        command = commands.add_parser(name)
        command.set_defaults(run=function)
        command.add_argument("data", metavar="DATA", help="folder that fairseq-preprocess wrote")
        command.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="folders that train.sh wrote")
        command.add_argument(
            "--checkpoint", metavar="NAME", help="of each DIR (default: average.pt or checkpoint_best.pt)"
        )
        command.add_argument("--out", type=Path, default=Path(f"{name}_run"), help="folder (default: %(default)s)")
        command.add_argument("--cpu", action="store_true", help="use the CPU where there is a GPU, too")
        if name != "similarity":
            command.add_argument("--subset", default="test", help="split to read (default: %(default)s)")
    command = commands.choices["rank"]
    command.add_argument("--contexts", type=int, metavar="N", help="the first N alone that --batch-size columns give")
    command.add_argument(
        "--batch-size", type=int, metavar="B", help="columns of a text (default: 1) or sentences of a translation (32)"
    )
    command = commands.choices["predictions"]
    command.add_argument("--top", type=int, default=5, metavar="K", help="how many words (default: %(default)s)")
    command.add_argument(
        "--at", nargs="+", action="extend", default=[], metavar="LINE:WORD", help="positions, both from 1"
    )
    command.add_argument("--random", type=int, default=0, metavar="N", help="as many positions, drawn from --seed")
    command.add_argument("--seed", type=int, help="of --random (default: 1)")
    command.add_argument("--search", nargs=2, metavar=("A", "B"), help="where A's loss is most below B's (two DIRs)")
    command.add_argument("--search-count", type=int, metavar="N", help="of --search (default: 6)")
    command.add_argument("--paper", action="store_true", help="the 18 positions of the papers in PTB's test text")
    command = commands.choices["similarity"]
    command.add_argument("--pairs", required=True, type=Path, metavar="FOLDER", help=".txt files 'word word score'")
    command.add_argument("--embedding", choices=("input", "output"), default="input", help="default: %(default)s")
    args = parser.parse_args(argv)
    check(args)
    return args


def check(args: argparse.Namespace) -> None:
    """Raises UserError for the first mistake; names the folders, by their paths where two have one name."""
    check_least(args, contexts=2, batch_size=1, top=1, random=0, search_count=1)
    for name, of, default in (("seed", "random", 1), ("search_count", "search", 6)):
        if getattr(args, name, None) is None:
            setattr(args, name, default)
        elif not getattr(args, of):
            raise UserError(f"--{name.replace('_', '-')} {getattr(args, name)} needs --{of}")
    for folder in args.folders:
        find_checkpoint(folder, args.checkpoint)
        if args.command not in LEAVE_NOTHING and not os.access(folder, os.W_OK):
            raise UserError(f"{folder} cannot be written to, and {args.command}.json belongs there")
    names = [folder.resolve().name for folder in args.folders]
    args.names = {folder: name if names.count(name) == 1 else str(folder) for folder, name in zip(args.folders, names)}
    if getattr(args, "search", None):
        for given in args.search:
            find_name(args, given)
    if args.command == "similarity" and not args.pairs.is_dir():
        raise UserError(f"--pairs {args.pairs} is no folder: give one of files 'word word score'")
    make_folder(args.out)


def tell_checkpoints(args: argparse.Namespace) -> None:
    """Says which file each folder's model is read from, and where figures of them may not be those that are meant."""
    chosen = [find_checkpoint(folder, args.checkpoint) for folder in args.folders]
    for checkpoint in chosen:
        print(f"reading {checkpoint}", file=sys.stderr)
        last = checkpoint.with_name("checkpoint_last.pt")
        if checkpoint.name == "average.pt" and last.is_file() and last.stat().st_mtime > checkpoint.stat().st_mtime:
            print(f"warning: {last} is newer: the average is of an earlier training, or its beginning", file=sys.stderr)
    if len({checkpoint.name for checkpoint in chosen}) > 1:
        print("warning: averages beside single checkpoints: --checkpoint NAME takes one kind", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    tell_checkpoints(args)
    args.run(args)


if __name__ == "__main__":
    start.run(main)
