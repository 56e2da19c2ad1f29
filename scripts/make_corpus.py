#!/usr/bin/env python3
"""Write a small parallel corpus whose translations a low-rank output layer cannot express. No download, deterministic.

    python scripts/make_corpus.py --out corpus

Sentences of two invented languages, word for word in the same order: easy to align. What is hard is the choice of the
word. Each of the 256 source words has its own distribution over the 256 target words, drawn once from a symmetric
Dirichlet of concentration .01 (a few possible translations, the likeliest clearly ahead), and each translation in the
text is a draw from it. So the matrix of true log-probabilities, source words by target words, has full rank, 256, while
a softmax over embeddings of width E has E + 2 at most. This is the construction of bottleneck.py, with sentences around
it: the features that stand for a source word are for the network to learn.

Source sentences have 1 to 7 words, all equally likely and independent.

Files: {train,valid,test}.{src,tgt}, and
    test.likeliest.tgt  each source word of the test set by its likeliest translation, what a perfect model says: it
                        scores 100 BLEU against this, where against the sampled test.tgt nobody could score much
    truth.json          perplexity of test.tgt under the true distributions (the end of a sentence, which is certain,
                        counted as a token, as fairseq does) and the rank of their log-probabilities
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from itertools import product
from pathlib import Path
from typing import Sequence

import numpy as np
import start
import torch

from mixtape_plugin.analysis.bottleneck import random_conditional
from mixtape_plugin.analysis.rank import log_prob_rank
from mixtape_plugin.errors import UserError, check_least
from mixtape_plugin.files import writing

SOURCE_WORDS, TARGET_WORDS, CONCENTRATION = 256, 256, 0.01
MIN_WORDS, MAX_WORDS = 1, 7


def invent_words(consonants: str, count: int) -> np.ndarray:
    """Words of two or three syllables."""
    syllables = ["".join(pair) for pair in product(consonants, "aeiou")]
    words = ("".join(word) for length in (2, 3) for word in product(syllables, repeat=length))
    return np.array([word for word, _ in zip(words, range(count))])


def true_log_probs(seed: int) -> np.ndarray:
    """log P*(target word | source word) in nats, [SOURCE_WORDS, TARGET_WORDS] in float64."""
    return random_conditional(SOURCE_WORDS, TARGET_WORDS, CONCENTRATION, np.random.default_rng([seed, 0]))


def sample(
    log_probs: np.ndarray, num_sentences: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Source and target word numbers of all tokens, in a row, and the length of each sentence."""
    lengths = rng.integers(MIN_WORDS, MAX_WORDS, size=num_sentences, endpoint=True)
    source = rng.integers(len(log_probs), size=lengths.sum())
    # Inverse of all cumulative distributions at once: that of word i lies between i and i + 1.
    cumulative = np.exp(log_probs).cumsum(axis=1)
    cumulative = cumulative / cumulative[:, -1:] + np.arange(len(log_probs))[:, None]
    target = np.searchsorted(cumulative.ravel(), source + rng.random(len(source)), side="right")
    return source, target - source * log_probs.shape[1], lengths


def write_sentences(path: Path, words: np.ndarray, tokens: np.ndarray, lengths: np.ndarray) -> None:
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        for sentence in np.split(words[tokens], lengths.cumsum()[:-1]):
            file.write(" ".join(sentence) + "\n")


def write_corpus(folder: Path, seed: int, sizes: dict) -> None:
    """Writes all files into an existing folder; `sizes`: sentences of train, valid and test."""
    log_probs = true_log_probs(seed)
    source_words, target_words = invent_words("bdfgklmn", SOURCE_WORDS), invent_words("prstvwz", TARGET_WORDS)
    for number, (split, size) in enumerate(sizes.items(), 1):
        source, target, lengths = sample(log_probs, size, np.random.default_rng([seed, number]))
        write_sentences(folder / f"{split}.src", source_words, source, lengths)
        write_sentences(folder / f"{split}.tgt", target_words, target, lengths)
    write_sentences(folder / "test.likeliest.tgt", target_words, log_probs.argmax(axis=1)[source], lengths)
    nll = -log_probs[source, target].sum() / (len(target) + len(lengths))
    truth = {"perplexity": float(np.exp(nll)), "rank": log_prob_rank(torch.from_numpy(log_probs))}
    (folder / "truth.json").write_text(json.dumps(truth) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="new folder")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--train", type=int, default=40000, help="sentences (default: %(default)s)")
    parser.add_argument("--valid", type=int, default=500, help="sentences (default: %(default)s)")
    parser.add_argument("--test", type=int, default=500, help="sentences (default: %(default)s)")
    args = parser.parse_args(argv)
    sizes = {split: getattr(args, split) for split in ("train", "valid", "test")}
    check_least(args, seed=0, train=1, valid=1, test=1)
    if args.out.exists():
        raise UserError(f"--out {args.out} exists; choose a new folder, or remove it")

    try:
        with writing("--out", args.out):
            args.out.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=f".{args.out.name}.", dir=args.out.parent) as part:
                corpus = Path(part, "corpus")
                corpus.mkdir()
                write_corpus(corpus, args.seed, sizes)
                os.replace(corpus, args.out)
    except UserError:
        raise
    except (MemoryError, ValueError, OverflowError):  # ValueError: beyond what numpy counts to
        raise UserError("--train, --valid and --test are more sentences than fit in memory") from None
    print(f"{args.out}: " + ", ".join(f"{size:,} {split}" for split, size in sizes.items()) + " sentences")


if __name__ == "__main__":
    start.run(main)
