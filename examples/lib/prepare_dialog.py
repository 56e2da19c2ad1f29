#!/usr/bin/env python3
"""Dialogs, one a line in JSON (the format of NeuralDialog-CVAE), as lines for fairseq-preprocess. Prints one of

    python examples/lib/prepare_dialog.py context train.jsonl                 what goes before each response
    python examples/lib/prepare_dialog.py response train.jsonl                the responses
    python examples/lib/prepare_dialog.py dictionary train.jsonl --types N    the most frequent words, and the marks
    python examples/lib/prepare_dialog.py references test_multi_ref.json --responses test.response

or checks that a file is the one that git knows by an id: python examples/lib/prepare_dialog.py check FILE --blob ID

A dialog is {"utts": [[speaker, text, …], …], …}. Words are \\w+ and [^\\w\\s]+ of the text in lower case, the first 38
of an utterance. All utterances but a dialog's last are responses, as in the authors' loader, which never reaches it.
The context of one is "<other> <d>", which begins every dialog, and the utterances after it, of all these the last 9,
each with <me> before it where its speaker is that of the response, and else with <other>.

references: a line for each response, with tabs between several that go with the same context, the true one first.
"""

import argparse
import hashlib
import json
import os
import re
import sys
from collections import Counter
from pathlib import Path

MAX_WORDS = 38  # with the authors' <s> and </s> 40
MAX_CONTEXT = 9  # with the response 10
ME, OTHER, BEGIN = "<me>", "<other>", "<d>"
FAIRSEQ_SYMBOLS = 4  # <s>, <pad>, </s>, <unk>, which it adds by itself


def words(text):
    return re.findall(r"\w+|[^\w\s]+", text.lower())[:MAX_WORDS]


def read_dialogs(path):
    """Yields the dialogs of a file as lists of (speaker, words). Raises ValueError, which names the line."""
    number = 0
    with open(path, "rb") as file:  # decoded line by line, so that it is known which one cannot be
        try:
            for line in file:
                number += 1
                utterances = json.loads(line.decode("utf-8"))["utts"]
                dialog = [(speaker, words(text)) for speaker, text, *_ in utterances]
                if not dialog or not all(isinstance(speaker, str) for speaker, _ in dialog):
                    raise ValueError
                yield dialog
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}, line {number} is not UTF-8 text: {error.reason}") from None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise ValueError(
                f'{path}, line {number} is no dialog: wanted is {{"utts": [[speaker, text, …], …], …}} with at least '
                "one utterance"
            ) from None
    if not number:
        raise ValueError(f"{path} is empty")


def pairs(dialog):
    """Yields (context, response), lists of words, for each utterance but the last."""
    entries = [(None, [BEGIN]), *dialog]  # nobody says <d>: it is never <me>
    for end in range(1, len(dialog)):
        speaker, response = entries[end]
        context = entries[max(0, end - MAX_CONTEXT) : end]
        yield [word for who, said in context for word in (ME if who == speaker else OTHER, *said)], response


def dictionary(path, types):
    """(symbol, count) of a fairseq dictionary of `types` in all: words of all utterances, each counted once; marks."""
    marks = [
        (mark, 0) for mark in (ME, OTHER, BEGIN)
    ]  # last: gate sharing goes by frequency among the responses' words
    if types <= FAIRSEQ_SYMBOLS + len(marks):
        raise ValueError(f"--types is {types}, allowed is {FAIRSEQ_SYMBOLS + len(marks) + 1} or more")
    counts = Counter(word for dialog in read_dialogs(path) for _, said in dialog for word in said)
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return [*ranked[: types - FAIRSEQ_SYMBOLS - len(marks)], *marks]


def references(path, responses):
    """Lists of references, each a list of words, out of a JSON list of {"responses": [text, …], …}.

    Raises:
        ValueError: it has another number of entries than there are responses, or the first text of one is not the
            response in its place.
    """
    with open(path, encoding="utf-8") as file:
        try:
            found = [[words(text) for text in entry["responses"]] for entry in json.load(file)]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise ValueError(f'{path} is no list of {{"responses": [text, …], …}}') from None
    with open(responses, encoding="utf-8") as file:
        expected = [line.split() for line in file]
    if len(found) != len(expected):
        raise ValueError(f"{path} has {len(found)} entries for the {len(expected)} responses of {responses}")
    for number, (texts, response) in enumerate(zip(found, expected), 1):
        if not texts or texts[0] != response:
            raise ValueError(
                f'{path}, entry {number} begins with "{" ".join(texts[0]) if texts else ""}", and the response in '
                f'line {number} of {responses} is "{" ".join(response)}"'
            )
    return found


def check(path, blob):
    """Raises ValueError unless git's id of the file's content is `blob`."""
    digest = hashlib.sha1(f"blob {os.path.getsize(path)}\0".encode())
    digest.update(Path(path).read_bytes())
    if digest.hexdigest() != blob:
        raise ValueError(f"{path} is not the original: its git blob id is {digest.hexdigest()}, not {blob}")


def output_lines(args):
    if args.what == "dictionary":
        return (f"{symbol} {count}" for symbol, count in dictionary(args.file, args.types))
    if args.what == "references":
        return ("\t".join(" ".join(text) for text in texts) for texts in references(args.file, args.responses))
    if args.what == "check":
        return check(args.file, args.blob) or ()
    side = 0 if args.what == "context" else 1
    return (" ".join(pair[side]) for dialog in read_dialogs(args.file) for pair in pairs(dialog))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    for what in ("context", "response", "dictionary", "references", "check"):
        command = commands.add_parser(what)
        command.add_argument("file")
        if what == "dictionary":
            command.add_argument(
                "--types", type=int, default=10000, help="in all, with fairseq's symbols and the marks"
            )
        elif what == "references":
            command.add_argument("--responses", required=True, metavar="FILE", help="the test responses")
        elif what == "check":
            command.add_argument("--blob", required=True, metavar="ID")
    args = parser.parse_args(argv)
    try:
        for line in output_lines(args):
            print(line)
    except (OSError, ValueError) as error:
        sys.exit(f"prepare_dialog.py: {error}")


if __name__ == "__main__":
    main()
