#!/usr/bin/env python3
"""One Billion Word as the MoS and Mixtape papers have it: the text in lower case.

    python examples/lib/prepare_one_billion_word.py 1-billion-word-….tar.gz text/

SOURCE is the original archive, or the folder it was unpacked to. Writes to TEXT

    train.00 …     the training shards news.en-00001-of-00100 … (the archive has 99; its 100th is the held-out text)
    heldout.NN     held-out parts 00 and 10 (validation), 20, 30 and 40 (test)

Text streams through, a line in memory. Files that are there already are left as they are.
"""

import argparse
import contextlib
import os
import re
import sys
from pathlib import Path

from archives import archive_members, check_archive

TRAINING = re.compile(r"(?:.*/)?training-monolingual\.tokenized\.shuffled/news\.en-(\d{5})-of-00100")
HELDOUT = re.compile(r"(?:.*/)?heldout-monolingual\.tokenized\.shuffled/news\.en\.heldout-(\d{5})-of-00050")
HELDOUT_PARTS = (0, 10, 20, 30, 40)


def target(name, shards):
    """The file to write for one of the archive's, or None where it is not needed."""
    match = TRAINING.fullmatch(name)
    if match and 1 <= int(match[1]) <= shards:
        return f"train.{int(match[1]) - 1:02d}"
    match = HELDOUT.fullmatch(name)
    if match and int(match[1]) in HELDOUT_PARTS:
        return f"heldout.{int(match[1]):02d}"
    return None


def folder_files(path):
    """Yields (name, open file) for the files of an unpacked archive."""
    for file in sorted(path.rglob("news.en*")):
        if file.is_file():
            with open(file, "rb") as opened:
                yield file.relative_to(path.parent).as_posix(), opened


def lower_case(lines, path):
    """Writes lines of UTF-8 in lower case to `path`, which appears when it is whole. Raises UnicodeDecodeError."""
    part = f"{path}.part"
    with open(part, "w", encoding="utf-8", newline="\n") as file:
        for line in lines:
            # A carriage return would be a line's end to fairseq.
            file.write(line.decode("utf-8").replace("\r", " ").rstrip("\n").lower() + "\n")
    os.replace(part, path)


def write_text(source, text, shards):
    """Writes the train.NN and heldout.NN that are missing. Raises ValueError where the source lacks one."""
    wanted = [f"train.{n:02d}" for n in range(shards)] + [f"heldout.{n:02d}" for n in HELDOUT_PARTS]
    missing = {name for name in wanted if not (text / name).is_file()}
    if not missing:
        return
    if source.is_file():
        check_archive(source, ())  # damage would show at its end only, after files have got their names
    with contextlib.nullcontext(folder_files(source)) if source.is_dir() else archive_members(source) as files:
        for name, lines in files:
            found = target(name, shards)
            if found in missing:
                print(f"prepare_one_billion_word.py: {text / found}", file=sys.stderr, flush=True)
                try:
                    lower_case(lines, text / found)
                except UnicodeDecodeError as error:
                    raise ValueError(f"{name} in {source} is not UTF-8 text: {error.reason}") from None
                missing.remove(found)
    if missing:
        first = min(missing)
        number = int(first.split(".")[1])
        train = first.startswith("train")
        original = f"news.en-{number + 1:05d}-of-00100" if train else f"news.en.heldout-{number:05d}-of-00050"
        raise ValueError(f"{source} lacks {len(missing)} of the files that are needed, the first of them {original}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="the archive, or the folder it was unpacked to")
    parser.add_argument("text", type=Path, help="folder to write to")
    parser.add_argument("--shards", type=int, default=99, help="training shards to take (default: %(default)s)")
    args = parser.parse_args()
    try:
        args.text.mkdir(parents=True, exist_ok=True)
        write_text(args.source, args.text, args.shards)
    except (OSError, ValueError) as error:
        sys.exit(f"prepare_one_billion_word.py: {error}")


if __name__ == "__main__":
    main()
