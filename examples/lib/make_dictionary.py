#!/usr/bin/env python3
"""A fairseq dictionary of the words of several texts together, the most frequent first.

    python examples/lib/make_dictionary.py train valid test --output dict.txt
    python examples/lib/make_dictionary.py train.* --types 100000 --output dict.txt

What fairseq-preprocess --dict-only would write for all of them in one file, --nwordssrc being --types + 2; it takes one
file only. Equally frequent words are in alphabetical order; fairseq adds <s>, <pad>, </s> and <unk> itself.
"""

import argparse
import os
import sys
from collections import Counter

SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")


def count_words(paths):
    """Word -> how often it occurs in the files. Raises ValueError for a file that is not UTF-8 text."""
    counts = Counter()
    for path in paths:
        with open(path, encoding="utf-8") as file:
            try:
                for line in file:
                    counts.update(line.split())
            except UnicodeDecodeError as error:
                raise ValueError(f"{path} is not UTF-8 text: {error.reason}") from None
    for symbol in SPECIAL:
        counts.pop(symbol, None)
    return counts


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="+", help="files of words with white space between them")
    parser.add_argument("--types", type=int, help="keep so many, <unk> and </s> included (default: all)")
    parser.add_argument("--output", required=True, help="the dictionary")
    args = parser.parse_args()
    if args.types is not None and args.types < 3:
        sys.exit(f"make_dictionary.py: --types is {args.types}, allowed is 3 or more")
    try:
        counts = count_words(args.texts)
        kept = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[: args.types and args.types - 2]
        with open(args.output + ".part", "w", encoding="utf-8") as file:
            file.writelines(f"{word} {count}\n" for word, count in kept)
        os.replace(args.output + ".part", args.output)
    except (OSError, ValueError) as error:
        sys.exit(f"make_dictionary.py: {error}")


if __name__ == "__main__":
    main()
