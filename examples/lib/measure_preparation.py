#!/usr/bin/env python3
"""Time and memory of each stage of examples/wmt14_en_fr/prepare.sh, on texts made here that grow as real ones do.

    python examples/lib/measure_preparation.py FOLDER --pairs 100000 400000 --workers 2

Writes archives as the recipe downloads them, all text in the first one, and runs prepare.sh on them. Memory is the
resident memory of all its processes together, looked up every 50 ms at each stage; pages that processes share count for
each of them.

Word r of a language has a probability proportional to 1/r down to rank 10,000 and to 1/r^1.8 below, so that the number
of different words grows as the length of the text to the power of 1/1.8 (Heaps' law): some 3 million in each language
at 36 million pairs, of 24 and 26 words a sentence here.
"""

import argparse
import collections
import gzip
import itertools
import os
import random
import shutil
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path

import numpy as np
from prepare_parallel import MAX_COUNTED_WORDS, MAX_LEARNED_WORDS

ROOT = Path(__file__).resolve().parents[2]

HEAD, EXPONENT, BLOCK = 10_000, 1.8, 10_000
SEGMENTS = 100  # lines of valid and test text
LETTERS = {"en": "etaoinshrdlucmfwypvbgk", "fr": "esaitnrulodcmpévqfbghà"}  # the most frequent first
ENDINGS = {"en": ["", "s", "ing", "ed", "ly", "ness", "er"], "fr": ["", "s", "es", "ent", "ment", "er", "é"]}
STEMS = 20_000
SOURCES = {
    "wmt13/training-parallel-europarl-v7.tgz": "europarl-v7.fr-en.{}",
    "wmt13/training-parallel-commoncrawl.tgz": "commoncrawl.fr-en.{}",
    "wmt13/training-parallel-un.tgz": "undoc.2000.fr-en.{}",
    "wmt14/training-parallel-nc-v9.tgz": "news-commentary-v9.fr-en.{}",
    "wmt10/training-giga-fren.tar": "giga-fren.release2.fixed.{}.gz",
}


# ------------------------------------------------------------------------------------------------------- texts


def make_stem(rank, language):
    generator, letters = random.Random(rank), LETTERS[language]
    return "".join(letters[int(len(letters) * generator.random() ** 2)] for _ in range(3 + len(str(rank)) // 2))


def spell(rank, language, stems):
    """The first words are stems, the others two of them and an ending, of which the frequent ones are in more words."""
    if rank < STEMS:
        return stems[rank]
    generator = random.Random(rank)
    first, second, ending = (generator.random() ** 3 for _ in range(3))
    endings = ENDINGS[language]
    return stems[int(STEMS * first)] + stems[int(STEMS * second)] + endings[int(len(endings) * ending)]


def sample_ranks(count, generator):
    """Of 1, 2, …; as continuous ranks from each of the two power laws, the head below HEAD and the tail."""
    head, tail = np.log(HEAD), 1 / (EXPONENT - 1)
    uniform = generator.random(count)
    ranks = np.where(
        generator.random(count) < head / (head + tail),
        np.exp(uniform * head),
        HEAD * np.maximum(uniform, 1e-12) ** (-tail),
    )
    return ranks.astype(np.int64)


def write_text(path, language, pairs):
    lengths, generator = np.random.default_rng(1), np.random.default_rng(2 if language == "en" else 3)
    stems = [make_stem(rank, language) for rank in range(STEMS)]
    head = [spell(rank, language, stems) for rank in range(10 * HEAD)]
    with open(path, "w", encoding="utf-8") as file:
        for start in range(0, pairs, BLOCK):
            # The same in both languages, but for a tenth more in French.
            counts = np.clip(lengths.lognormal(3.0, 0.6, size=min(BLOCK, pairs - start)), 5, 100)
            counts = (counts * (1.1 if language == "fr" else 1)).astype(int)
            words = [
                head[rank] if rank < len(head) else spell(rank, language, stems)
                for rank in sample_ranks(counts.sum(), generator).tolist()
            ]
            ends = np.cumsum(counts).tolist()
            file.writelines(" ".join(words[a:b]) + " .\n" for a, b in zip([0, *ends], ends))


def write_archive(path, members):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz" if path.suffix == ".tgz" else "w") as archive:
        for name, file in members.items():
            archive.add(file, name)


def write_archives(folder, pairs):
    scratch = folder / "scratch"
    scratch.mkdir(parents=True)
    texts = {language: scratch / language for language in LETTERS}
    for language, path in texts.items():
        write_text(path, language, pairs)
    short = {language: scratch / f"short.{language}" for language in texts}
    for path in short.values():
        path.write_text("word\n", encoding="utf-8")
        with gzip.open(f"{path}.gz", "wb") as file:
            file.write(path.read_bytes())
    for n, (path, name) in enumerate(SOURCES.items()):
        files = texts if n == 0 else short
        ending = ".gz" if name.endswith(".gz") else ""
        write_archive(folder / path, {name.format(lang): f"{file}{ending}" for lang, file in files.items()})
    segments = {}
    for language in texts:
        with open(texts[language], encoding="utf-8") as file:
            lines = "".join(f'<seg id="{n}">{next(file).strip()}</seg>\n' for n in range(SEGMENTS))
        segments[language] = scratch / f"segments.{language}"
        segments[language].write_text(lines, encoding="utf-8")
    kinds = {"en": "src", "fr": "ref"}
    write_archive(
        folder / "wmt14" / "dev.tgz",
        {f"dev/newstest{year}-{kinds[lang]}.{lang}.sgm": segments[lang] for year in (2012, 2013) for lang in segments},
    )
    write_archive(
        folder / "wmt14" / "test-full.tgz",
        {f"test-full/newstest2014-fren-{kinds[lang]}.{lang}.sgm": segments[lang] for lang in segments},
    )
    shutil.rmtree(scratch)


# --------------------------------------------------------------------------------------------------- measuring


def resident(root):
    """Bytes of resident memory of a process and all that descend from it."""
    parents, sizes = {}, {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as file:
                    fields = file.read().rsplit(")", 1)[1].split()
            except OSError:  # it has ended
                continue
            parents[int(entry)], sizes[int(entry)] = int(fields[1]), int(fields[21])
    ours, found = set(), {root}
    while found:
        ours |= found
        found = {child for child, parent in parents.items() if parent in found}
    return sum(sizes.get(process, 0) for process in ours) * os.sysconf("SC_PAGE_SIZE")


def measure(command):
    """Runs it; name of the last file that it said it would make -> [seconds, peak of memory]."""
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, encoding="utf-8")
    stages, said, last = {}, ["start"], collections.deque(maxlen=5)

    def listen():
        for line in process.stderr:
            words = line.split()
            if line.startswith("prepare.sh: ") and len(words) == 2:
                said.append(words[1].split("/")[-1])
                print(line, end="", file=sys.stderr)
            last.append(line)

    listener = threading.Thread(target=listen)
    listener.start()
    then = time.time()
    while process.poll() is None:
        held = resident(process.pid)
        stage = stages.setdefault(said[-1], [0.0, 0])
        stage[1] = max(stage[1], held)
        time.sleep(0.05)
        stage[0] += time.time() - then
        then = time.time()
    listener.join()
    if process.returncode:
        sys.exit(f"measure_preparation.py: {command[0]} ended with {process.returncode}: {''.join(last)}")
    return stages


def write_many_words(folder, count):
    """A text of so many different words, and a list of the words to learn from."""
    stems = [make_stem(rank, "en") for rank in range(STEMS)]
    text, words = folder / "many", folder / "many.words"
    with open(text, "w", encoding="utf-8") as file:
        for rank in range(count):
            file.write(f"{stems[rank % STEMS]}{rank // STEMS}" + (" " if rank % 20 else "\n"))
    seen = {spell(rank, "en", stems): None for rank in range(2 * MAX_LEARNED_WORDS)}
    with open(words, "w", encoding="utf-8") as file:
        file.writelines(
            f"{word} {10**9 // (n + 1)}\n" for n, word in enumerate(itertools.islice(seen, MAX_LEARNED_WORDS))
        )
    return text, words


def measure_limits(folder, workers, merges):
    """What does not grow any more, at its limit: words counted at once, and words that subwords are learned of."""
    text, words = write_many_words(folder, MAX_COUNTED_WORDS)
    prepare = [sys.executable, ROOT / "examples" / "lib" / "prepare_parallel.py"]
    learn = [Path(sys.executable).parent / "subword-nmt", "learn-bpe", "--dict-input"]
    for command in (
        [*prepare, "words", text, "--output", folder / "words", "--workers", workers],
        [*learn, "--symbols", merges, "--input", words, "--output", folder / "codes"],
        [*prepare, "sentencepiece", words, folder / "spm.model", "--size", merges],
    ):
        command = list(map(str, command))
        ((seconds, peak),) = measure(command).values()
        print(f"| {' '.join(command)} | {peak / 2**20:,.0f} MiB, {seconds:.0f} s |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pairs", type=int, nargs="*", default=[100_000, 400_000], help="sizes of the texts")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--merges", type=int, default=32_000)
    parser.add_argument("--limits", action="store_true", help="also what learns, at its largest size")
    args = parser.parse_args()
    if min(args.pairs, default=SEGMENTS) < SEGMENTS:
        parser.error(f"--pairs is {min(args.pairs)}, allowed is {SEGMENTS} or more, which are also valid and test text")
    if args.folder.exists() or " " in str(args.folder):
        sys.exit(f"measure_preparation.py: {args.folder} exists already or has a space in its name; give a new folder")
    args.folder.mkdir(parents=True)
    if args.limits:
        measure_limits(args.folder, args.workers, args.merges)
    for pairs in sorted(args.pairs):
        archives, out = args.folder / f"archives.{pairs}", args.folder / f"data.{pairs}"
        write_archives(archives, pairs)
        options = ["--from", archives, "--out", out, "--workers", args.workers, "--merges", args.merges]
        stages = measure([ROOT / "examples" / "wmt14_en_fr" / "prepare.sh", *map(str, options)])
        with open(out / "text" / "words", "rb") as file:
            print(f"{pairs:,} pairs have {sum(1 for _ in file):,} different words", flush=True)
        print("| making | peak of memory, time |\n| --- | --- |")
        for stage, (seconds, peak) in stages.items():
            print(f"| {stage} | {peak / 2**20:,.0f} MiB, {seconds:.0f} s |", flush=True)


if __name__ == "__main__":
    main()
