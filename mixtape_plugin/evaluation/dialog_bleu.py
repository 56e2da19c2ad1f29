"""Precision and recall of smoothed sentence BLEU over several replies to a context (Zhao et al. 2017, section 5.2).

Words are whatever can be compared, strings or ids.
"""

from __future__ import annotations

import math
from collections import Counter
from statistics import fmean
from typing import List, NamedTuple, Sequence

MAX_ORDER = 4  # of the figures; the smoothing of the last order looks at 5-grams
SIGNATURE = "smooth:nltk-method7|orders:4,padded|scale:0-1"

Words = Sequence[str]


class Score(NamedTuple):
    """BLEU-1 to 4, each averaged over the contexts."""

    precision: List[float]
    recall: List[float]


def ngrams(words: Words, n: int) -> Counter:
    return Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))


def sentence_bleu(hypothesis: Words, reference: Words) -> List[float]:
    """BLEU-1 to 4 of one hypothesis against one reference, smoothed.

    With T words and p_m = matches / max(1, T−m+1) for m = 1 … 5; the i-th of the orders 1 to 4 without a match gets
    p_m = ln T / (5·2^i) / max(1, T−m+1) if T > 1 (Chen and Cherry 2014, smoothing 4); then each is averaged with its
    neighbours, q_0 = p_1 + 1, q_m = (q_{m−1} + p_m + p_{m+1}) / 3 (smoothing 5), and

        BLEU-n = (q_1 ⋯ q_n)^{1/n} · min(1, e^{1−r/T}), r words in the reference

    This is method 7 of today's NLTK, ``sentence_bleu`` with weights padded to 4 orders, so that q_n for n < 4 has p_n
    smoothed in it as well. NLTK 3.2.5, of the papers' time, smoothed otherwise and divided by 0 at T = 1.

    Returns:
        four numbers from 0 (no word matches, or there is none) on; q_0 makes them exceed 1 where all matches: 4/3 for
        an exact match at n = 1.
    """
    length = len(hypothesis)
    matches = [sum((ngrams(hypothesis, n) & ngrams(reference, n)).values()) for n in range(1, MAX_ORDER + 2)]
    if not matches[0]:
        return [0.0] * MAX_ORDER
    missing = 0
    precisions = []
    for n, matched in enumerate(matches, 1):
        if not matched and n <= MAX_ORDER and length > 1:
            missing += 1
            matched = math.log(length) / (5 * 2**missing)
        precisions.append(matched / max(1, length - n + 1))
    log_bleu = min(0.0, 1 - len(reference) / length)
    previous, log_product, scores = precisions[0] + 1, 0.0, []
    for n in range(MAX_ORDER):
        previous = (previous + precisions[n] + precisions[n + 1]) / 3
        log_product += math.log(previous)
        scores.append(math.exp(log_product / (n + 1) + log_bleu))
    return scores


def context_bleu(hypotheses: Sequence[Words], references: Sequence[Words]) -> Score:
    """Of one context: with s_ij the BLEU of hypothesis i against reference j, precision is mean_i max_j s_ij and recall
    mean_j max_i s_ij. With one reference recall is never below precision.

    Raises:
        ValueError: there is no hypothesis, or no reference.
    """
    if not hypotheses or not references:
        raise ValueError(f"{len(hypotheses)} hypotheses and {len(references)} references: there must be at least one")
    table = [[sentence_bleu(hypothesis, reference) for reference in references] for hypothesis in hypotheses]
    precision, recall = [], []
    for n in range(MAX_ORDER):
        scores = [[bleu[n] for bleu in row] for row in table]
        precision.append(fmean(map(max, scores)))
        recall.append(fmean(map(max, zip(*scores))))
    return Score(precision, recall)


def corpus_bleu(hypotheses: Sequence[Sequence[Words]], references: Sequence[Sequence[Words]]) -> Score:
    """:func:`context_bleu` averaged over contexts, each with any number of hypotheses and of references.

    Raises:
        ValueError: the two differ in their number of contexts, there is none, or one has no hypothesis or reference.
    """
    if len(hypotheses) != len(references) or not references:
        raise ValueError(f"there are hypotheses of {len(hypotheses)} contexts and references of {len(references)}")
    scores = [context_bleu(*context) for context in zip(hypotheses, references)]
    return Score(*(list(map(fmean, zip(*rows))) for rows in zip(*scores)))
