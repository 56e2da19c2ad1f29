#!/usr/bin/env python3
"""The replies of several dialog trainings to the same contexts, side by side in Markdown, and how varied they are.

    python scripts/compare_replies.py DIR DIR … --data data-bin/switchboard --contexts 1 1001 2001

Each DIR is a training's folder after evaluate.sh, with its replies.txt; --data is what prepare.sh wrote. First come, of
all contexts, the number of different best replies, the most frequent of them with its share, and their mean length in
words. Then for each context that is named, counted from 1, its last utterances, the true response, and each training's
replies, best first.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from itertools import zip_longest
from pathlib import Path
from typing import Sequence

import start

from mixtape_plugin.errors import UserError, check_least
from mixtape_plugin.files import check_outputs, read_lines, write_outputs, write_text
from mixtape_plugin.tables import table


def variety(name: str, replies: Sequence[Sequence[str]]) -> list[str]:
    """A row about the best replies: how many differ, the most frequent with its share, their mean number of words."""
    best = [nbest[0] for nbest in replies]
    ((reply, times),) = Counter(best).most_common(1)
    words = sum(len(text.split()) for text in best) / len(best)
    return [name, f"{len(set(best)):,}", f"“{reply}”, {times / len(best):.1%}", f"{words:.1f}"]


def utterances(context: str) -> list[str]:
    """``<me> hello <other> hi there`` as ``me: hello`` and ``other: hi there``."""
    parts = re.split(r"(?:^| )<(me|other)>(?= |$)", context)[1:]
    return [f"{who}: {words.strip()}" for who, words in zip(parts[::2], parts[1::2])]


def compare(trainings: dict, contexts: Sequence[str], responses: Sequence[str], shown: Sequence[int], last: int) -> str:
    """The page. ``trainings`` has for each name the replies to each context, best first."""
    text = f"Best replies to {len(contexts):,} contexts:\n\n"
    rows = [variety(name, replies) for name, replies in trainings.items()]
    text += table(["training", "different", "most frequent", "words"], rows)
    for number in shown:
        said = [*utterances(contexts[number - 1])[-last:], f"the response: {responses[number - 1]}"]
        text += f"\n**Context {number:,}**\n\n" + "".join(f"- {line}\n" for line in said) + "\n"
        rows = zip_longest(*(replies[number - 1] for replies in trainings.values()), fillvalue="")
        text += table(["", *trainings], ([str(i), *row] for i, row in enumerate(rows, 1)))
    return text.replace("<", "&lt;")  # <unk> is no HTML


def read(path: Path, size: int | None = None) -> list[str]:
    """The lines of a file, without their ends; where ``size`` is given, that many."""
    lines = [line.rstrip("\r\n") for line in read_lines(path)]
    if size not in (None, len(lines)):
        raise UserError(f"{path} has {len(lines)} lines for {size} contexts: of another test set?")
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "trainings", type=Path, nargs="+", metavar="DIR", help="folders with the replies.txt of evaluate.sh"
    )
    parser.add_argument(
        "--data",
        type=Path,
        default=Path("data-bin/switchboard"),
        metavar="DIR",
        help="what examples/switchboard/prepare.sh wrote (default: data-bin/switchboard)",
    )
    parser.add_argument("--contexts", type=int, nargs="+", default=[1], metavar="N", help="which to show, from 1 on")
    parser.add_argument(
        "--utterances", type=int, default=3, metavar="N", help="how many of a context's last (default: 3)"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the page here rather than print it")
    args = parser.parse_args(argv)

    texts = args.data / "text" / "test.context", args.data / "text" / "test.response"
    check_outputs({"--output": args.output}, [*texts, *(folder / "replies.txt" for folder in args.trainings)])
    contexts = read(texts[0])
    responses = read(texts[1], len(contexts))
    for number in args.contexts:
        if not 1 <= number <= len(contexts):
            raise UserError(f"--contexts {number} is not allowed: 1 to {len(contexts)}, the number of contexts")
    check_least(args, utterances=1)
    trainings = {}
    for folder in args.trainings:
        name = folder.resolve().name
        if name in trainings:
            raise UserError(f"{folder}: another training is called {name}, too")
        trainings[name] = [line.split("\t") for line in read(folder / "replies.txt", len(contexts))]
    page = compare(trainings, contexts, responses, args.contexts, args.utterances)
    write_outputs(("--output", args.output, lambda path: write_text(path, page)))
    if not args.output:
        print(page, end="")


if __name__ == "__main__":
    start.run(main)
