#!/usr/bin/env python3
"""Parallel text for translation.sh, streamed: archives -> raw -> Moses tokens, cleaned -> words -> subwords.

    prepare_parallel.py check newstest2013-src.en.sgm newstest2013-ref.de.sgm dev.tgz
    prepare_parallel.py extract text/raw.valid en de dev.tgz:newstest2013-src.en.sgm:newstest2013-ref.de.sgm
    prepare_parallel.py tokenize text/raw.train text/tok.train en de --clean --workers 16
    prepare_parallel.py words text/tok.train.en text/tok.train.de --output text/words
    prepare_parallel.py sentencepiece text/words text/spm.model --size 32000
    prepare_parallel.py subwords text/codes text/tok.train.en text/bpe.train.en --workers 16

Lines go to the processes in chunks and come back in order: the output is the same with any number of them, and memory
does not grow with the text. Files appear under their names when they are whole.

--clean keeps a pair of sentences where both are UTF-8, have 1 to 250 tokens of at most 1,000 characters each and 10,000
characters in all, and neither has more than 1.5 times the tokens of the other.
"""

import argparse
import contextlib
import errno
import heapq
import itertools
import multiprocessing
import os
import sys
import threading
from collections import Counter, deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from archives import check_archive, member_lines
from tqdm import tqdm

MAX_TOKENS, MAX_TOKEN_LENGTH, MAX_LINE_LENGTH, MAX_RATIO = 250, 1000, 10_000, 1.5
CHUNK = 2000  # lines a process gets at once
MAX_CACHED_WORDS = 500_000  # a process, which bounds its memory
MAX_COUNTED_WORDS = 8_000_000  # words counted at once: over it, those seen once so far are forgotten, then twice, …
MAX_LEARNED_WORDS = 1_000_000  # the most frequent ones, of which BPE is learned


# ------------------------------------------------------------------------------------------------------ files


@contextlib.contextmanager
def whole_files(*paths):
    """Opens files for writing (bytes) that appear together under their names at the end, or not at all."""
    parts = [f"{path}.part" for path in paths]
    try:
        with contextlib.ExitStack() as stack:
            yield [stack.enter_context(open(part, "wb")) for part in parts]
        for part, path in zip(parts, paths):
            os.replace(part, path)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise OSError(error.errno, error.strerror, os.path.dirname(parts[0]) or ".") from None  # which it does not tell
    finally:
        for part in parts:
            if os.path.lexists(part):
                os.unlink(part)


def extract(output, languages, sources, strict):
    """Writes OUTPUT.LANGUAGE: one file of each of the archives after the other, of as many lines in both languages."""
    sources = [source.rsplit(":", 2) for source in sources]
    counts = [[], []]
    with whole_files(*(f"{output}.{language}" for language in languages)) as files:
        for side in (0, 1):
            for archive, *names in sources:
                count, lines = 0, member_lines(archive, names[side])
                for count, line in enumerate(tqdm(lines, names[side], unit=" lines", unit_scale=True, disable=None), 1):
                    if strict and "\ufffd" in line:
                        raise ValueError(f"{names[side]} of {archive}, line {count} is not UTF-8 text")
                    files[side].write(line.encode("utf-8") + b"\n")
                if not count:
                    raise ValueError(f"{names[side]} of {archive} is empty")
                counts[side].append(count)
        for (archive, *names), first, second in zip(sources, *counts):
            if first != second:
                raise ValueError(
                    f"{archive}: {names[0]} has {first} lines and {names[1]} {second}; "
                    "they must be translations line by line"
                )


# ------------------------------------------------------------------------------------------- several processes


def end_with_parent():
    """A process whose parent was killed would wait for work for ever."""

    def wait():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def nothing():
    pass


def start_process(prepare, *args):
    end_with_parent()
    prepare(*args)


def in_order(function, chunks, workers, prepare, *args):
    """Yields function(chunk) for each chunk, in order; `workers` processes, each of which calls prepare(*args) first.

    Two chunks a process are read ahead, no more.
    """
    if workers == 1:
        prepare(*args)
        yield from map(function, chunks)
        return
    with ProcessPoolExecutor(workers, initializer=start_process, initargs=(prepare, *args)) as pool:
        pending = deque()
        try:
            for chunk in chunks:
                pending.append(pool.submit(function, chunk))
                if len(pending) >= 2 * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool:
            raise ValueError(
                "one of the processes was killed, for want of memory perhaps; try fewer --workers"
            ) from None


def chunks_of(path):
    """The lines (bytes, with their ends) of a file in chunks, with a progress bar."""
    with open(path, "rb") as file, tqdm(
        total=os.path.getsize(path), desc=os.path.basename(path), unit="B", unit_scale=True, disable=None
    ) as progress:
        while True:
            chunk = list(itertools.islice(file, CHUNK))
            if not chunk:
                return
            progress.update(sum(map(len, chunk)))
            yield chunk


def paired_chunks(first, second):
    for pair in itertools.zip_longest(chunks_of(first), chunks_of(second), fillvalue=()):
        if len(pair[0]) != len(pair[1]):
            raise ValueError(f"{first} and {second} differ in their number of lines")
        yield pair


# ------------------------------------------------------------------------------------------------------ tokens


def prepare_tokens(languages, clean, lower_case=False):
    global normalizers, tokenizers, cleaning, lowering
    from fast_moses import Normalizer, Tokenizer  # half a second that the other commands need not wait

    normalizers, tokenizers = [list(map(kind, languages)) for kind in (Normalizer, Tokenizer)]
    cleaning, lowering = clean, lower_case


def tokenize(line, side):
    # With the line's end, which a rule for quotes goes by.
    line = line.lower() if lowering else line
    return tokenizers[side].tokenize(normalizers[side].normalize(line + "\n"), return_str=True)


def tokenize_pairs(chunk):
    """(lines of one language, of the other), bytes -> the same tokenized, as two bytes, and what became of how many."""
    outputs, counts = ([], []), Counter()
    for pair in zip(*chunk):
        pair = [line.decode("utf-8").rstrip("\n") for line in pair]
        fate = "kept"
        if cleaning and max(map(len, pair)) > MAX_LINE_LENGTH:
            fate = "too long"
        else:
            pair = [tokenize(line, side) for side, line in enumerate(pair)]
            if cleaning:
                fate = fate_of(*pair)
        counts[fate] += 1
        if fate == "kept":
            for output, line in zip(outputs, pair):
                output.append(line + "\n")
    return ["".join(output).encode("utf-8") for output in outputs], counts


def fate_of(*pair):
    """Whether a tokenized pair is kept, or why it is not."""
    if any("\ufffd" in line for line in pair):
        return "not UTF-8"
    words = [line.split() for line in pair]
    short, long = sorted(map(len, words))
    if short == 0:
        return "empty"
    if long > MAX_TOKENS or any(len(word) > MAX_TOKEN_LENGTH for side in words for word in side):
        return "too long"
    return "kept" if long <= MAX_RATIO * short else "lengths too different"


def tokenize_files(source, target, languages, clean, workers, lower_case=False):
    inputs, outputs = ([f"{prefix}.{language}" for language in languages] for prefix in (source, target))
    counts = Counter()
    with whole_files(*outputs) as files:
        start = prepare_tokens, languages, clean, lower_case
        for texts, fates in in_order(tokenize_pairs, paired_chunks(*inputs), workers, *start):
            counts.update(fates)
            for file, text in zip(files, texts):
                file.write(text)
        if not counts["kept"]:
            raise ValueError(f"of {inputs[0]} and {inputs[1]} no pair of sentences is left")
        if clean:
            reasons = ("empty", "too long", "lengths too different", "not UTF-8")
            dropped = ", ".join(f"{fate} {counts[fate]}" for fate in reasons)
            print(f"pairs kept: {counts['kept']} of {sum(counts.values())}; dropped: {dropped}", flush=True)


# ---------------------------------------------------------------------------------------------------- subwords


def count_chunk(chunk):
    return Counter(b"".join(chunk).decode("utf-8").split())


def count_words(paths, output, workers):
    """Writes "word count" lines, the most frequent first, of the files together."""
    counts, rare = Counter(), 0
    for path in paths:
        for more in in_order(count_chunk, chunks_of(path), workers, nothing):
            counts.update(more)
            if len(counts) > MAX_COUNTED_WORDS:
                rare += 1
                for word in [word for word, count in counts.items() if count <= rare]:
                    del counts[word]
    words = heapq.nsmallest(MAX_LEARNED_WORDS, counts.items(), key=lambda item: (-item[1], item[0]))
    with whole_files(output) as (file,):
        file.writelines(f"{word} {count}\n".encode("utf-8") for word, count in words)


def learn_sentencepiece(words, model, size):
    """A sentencepiece BPE model of the words and their counts; the text is taken as it is, without normalization."""
    import sentencepiece

    part = f"{model}.part"
    table = f"{words}.tsv.part"
    try:
        with open(words, "rb") as source, open(table, "wb") as file:
            file.writelines(b"\t".join(line.rsplit(b" ", 1)) for line in source)
        sentencepiece.SentencePieceTrainer.train(
            input=table, input_format="tsv", model_prefix=part, model_type="bpe", vocab_size=size, num_threads=1,
            normalization_rule_name="identity", hard_vocab_limit=False, minloglevel=1,
        )  # fmt: skip
        os.replace(f"{part}.model", model)
    except RuntimeError as error:
        raise ValueError(f"sentencepiece could not learn {size} subwords of {words}: {error}") from None
    finally:
        for leftover in (table, f"{part}.model", f"{part}.vocab"):
            if os.path.exists(leftover):
                os.unlink(leftover)


class Subwords(dict):
    """Word -> its subwords with spaces between them, remembered."""

    def __init__(self, codes):
        super().__init__()
        from subword_nmt.apply_bpe import BPE

        with open(codes, encoding="utf-8", newline="\n") as file:
            self.bpe = BPE(file)

    def __missing__(self, word):
        if len(self) >= MAX_CACHED_WORDS:
            self.clear()
        self.bpe.cache.clear()
        self[word] = " ".join(self.bpe.segment_tokens([word]))
        return self[word]

    def line(self, line):
        subwords = " ".join(map(self.__getitem__, line.split()))
        if line[:1] != " " != line[-1:]:
            return subwords
        # subword-nmt leaves spaces at the ends, and sacremoses one after a final apostrophe.
        start, end = len(line) - len(line.lstrip(" ")), len(line.rstrip(" "))
        return line[:start] + subwords + line[end:] if subwords else line


def prepare_subwords(model):
    global segment
    if model.endswith(".model"):
        import sentencepiece

        processor = sentencepiece.SentencePieceProcessor(model_file=model)

        def segment(line):
            return " ".join(processor.encode(line, out_type=str))
    else:
        segment = Subwords(model).line


def segment_chunk(chunk):
    lines = [line.decode("utf-8").rstrip("\n") for line in chunk]
    return "".join(segment(line) + "\n" for line in lines).encode("utf-8")


def apply_subwords(model, source, target, workers):
    with whole_files(target) as (file,):
        for text in in_order(segment_chunk, chunks_of(source), workers, prepare_subwords, model):
            file.write(text)


# -------------------------------------------------------------------------------------------------------- main


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("check", help="an archive that is whole and holds files of these names")
    command.add_argument("--md5", default="")
    command.add_argument("names", nargs="*")
    command.add_argument("archive")
    command = commands.add_parser("extract", help="text out of archives: OUTPUT.LANGUAGE of both languages")
    command.add_argument("output")
    command.add_argument("languages", nargs=2)
    command.add_argument("sources", nargs="+", metavar="ARCHIVE:NAME:NAME")
    command.add_argument("--strict", action="store_true", help="no text but UTF-8")
    command = commands.add_parser("tokenize", help="INPUT.LANGUAGE -> OUTPUT.LANGUAGE of both languages")
    command.add_argument("input")
    command.add_argument("output")
    command.add_argument("languages", nargs=2)
    command.add_argument("--clean", action="store_true")
    command.add_argument("--lower-case", action="store_true")
    command.add_argument("--workers", type=int, default=1)
    command = commands.add_parser("words", help="the words of texts and their counts")
    command.add_argument("texts", nargs="+")
    command.add_argument("--output", required=True)
    command.add_argument("--workers", type=int, default=1)
    command = commands.add_parser("sentencepiece", help="learn a model of words and their counts")
    command.add_argument("words")
    command.add_argument("model")
    command.add_argument("--size", type=int, required=True)
    command = commands.add_parser("subwords", help="segment a text by codes, or by a .model of sentencepiece")
    command.add_argument("model")
    command.add_argument("input")
    command.add_argument("output")
    command.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    if getattr(args, "workers", 1) < 1:
        parser.error(f"--workers is {args.workers}, allowed is a positive whole number")
    return args


def main():
    args = parse_args()
    try:
        if args.command == "check":
            check_archive(args.archive, args.names, args.md5)
        elif args.command == "extract":
            extract(args.output, args.languages, args.sources, args.strict)
        elif args.command == "tokenize":
            tokenize_files(args.input, args.output, args.languages, args.clean, args.workers, args.lower_case)
        elif args.command == "words":
            count_words(args.texts, args.output, args.workers)
        elif args.command == "sentencepiece":
            learn_sentencepiece(args.words, args.model, args.size)
        else:
            apply_subwords(args.model, args.input, args.output, args.workers)
    except (OSError, ValueError) as error:
        sys.exit(f"prepare_parallel.py: {error}")


if __name__ == "__main__":
    main()
