#!/usr/bin/env python3
"""Precision and recall of BLEU-1 to 4 over several replies to each context, out of what fairseq-generate printed.

    python scripts/score_dialog.py --generated generate.log --references test.response

Of the n best replies to a context (--nbest) and its references, s_ij being the smoothed BLEU of reply i against
reference j: precision is the mean over i of the largest s_ij, recall the mean over j, both averaged over contexts.
Words are what lies between white space: the references' unknown ones are as the text has them, and <unk> matches none.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Sequence

import start

from mixtape_plugin.errors import UserError
from mixtape_plugin.evaluation.dialog_bleu import SIGNATURE, corpus_bleu
from mixtape_plugin.files import check_outputs, read_lines, write_outputs, write_text


def read_generated(path: Path) -> list:
    """The replies to each context, best first, in the order of the test set, out of the lines H-NUMBER of a log.

    fairseq-generate prints contexts of similar length together, each with its number.

    Raises:
        ValueError: a line is damaged, a context has no replies or another number of them than the others, or there is
            none.
    """
    replies = {}
    for number, line in enumerate(read_lines(path), 1):
        if line.startswith("H-"):
            found = re.fullmatch(r"H-(\d+)\t[^\t]+\t([^\t]*)\n", line)
            if not found:
                raise ValueError(f"{path}, line {number} is damaged: wanted is H-NUMBER, a score and a reply")
            replies.setdefault(int(found[1]), []).append(found[2].split())
    if not replies:
        raise ValueError(f"{path} holds no replies, which are lines that begin with H-")
    nbest = len(replies[min(replies)])
    for context in range(max(replies) + 1):
        if len(replies.get(context, ())) != nbest:
            raise ValueError(
                f"{path} has {len(replies.get(context, ()))} replies to context {context} and {nbest} to another: "
                "generate them again"
            )
    return [replies[context] for context in range(len(replies))]


def read_references(path: Path) -> list:
    """A list of references for each line, which has tabs between them; each a list of words."""
    return [[text.split() for text in line.rstrip("\r\n").split("\t")] for line in read_lines(path)]


def score(replies: list, references: list) -> list[dict]:
    """Scores of a test set, each a dict of ``metric``, ``score`` and ``signature``, as score.py has them."""
    counts = sorted({len(texts) for texts in references})
    nrefs = "-".join(map(str, dict.fromkeys([counts[0], counts[-1]])))
    signature = f"nhyps:{len(replies[0])}|nrefs:{nrefs}|{SIGNATURE}"
    bleu = corpus_bleu(replies, references)
    return [
        {"metric": f"BLEU-{n} {kind}", "score": values[n - 1], "signature": signature, "preprocessing": None}
        for n in range(1, 5)
        for kind, values in zip(("precision", "recall"), bleu)
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generated", required=True, metavar="FILE", help="what fairseq-generate --nbest N printed")
    parser.add_argument(
        "--references", required=True, metavar="FILE", help="a line for each context, with tabs between several"
    )
    parser.add_argument("--replies", type=Path, metavar="FILE", help="also write the replies, a line for each context")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the scores here")
    args = parser.parse_args(argv)
    check_outputs({"--replies": args.replies, "--json": args.json}, [args.generated, args.references])
    try:
        replies, references = read_generated(args.generated), read_references(args.references)
        if len(replies) != len(references):
            raise ValueError(
                f"{args.generated} has replies to {len(replies)} contexts, {args.references} references for "
                f"{len(references)}"
            )
        results = score(replies, references)
        text = "".join("\t".join(" ".join(reply) for reply in nbest) + "\n" for nbest in replies)
    except ValueError as error:
        raise UserError(str(error)) from None
    write_outputs(
        ("--replies", args.replies, lambda path: write_text(path, text)),
        ("--json", args.json, lambda path: write_text(path, json.dumps(results, indent=2) + "\n")),
    )

    for row in results:
        print(f"{row['metric']:<18}{row['score']:6.4f}  {row['signature']}")
    if max(map(len, references)) == 1:
        print("one reference for each context: not to be compared with figures from several, such as the papers'")


if __name__ == "__main__":
    start.run(main)
