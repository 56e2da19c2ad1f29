"""Precision and recall of smoothed sentence BLEU: against NLTK, and by hand."""

import math
import random
import warnings

import pytest

from mixtape_plugin.evaluation.dialog_bleu import context_bleu, corpus_bleu, sentence_bleu


def test_equals_method_7_of_nltk():
    """1,000 random pairs: every length from one word on, with repeats, without a match, of one word only."""
    bleu_score = pytest.importorskip("nltk.translate.bleu_score", reason="nltk is not installed")
    method7 = bleu_score.SmoothingFunction().method7
    rng = random.Random(1)
    zeros = singles = 0
    for _ in range(1000):
        words = "abcdefgh"[: rng.randint(1, 8)]
        reference = rng.choices(words, k=rng.randint(1, 12))
        hypothesis = rng.choice([rng.choices("bcdefghij", k=rng.randint(1, 12)), reference[: rng.randint(1, 12)]])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no overlap of some order
            expected = [
                bleu_score.sentence_bleu([reference], hypothesis, [1 / n] * n + [0] * (4 - n), method7)
                for n in range(1, 5)
            ]
        assert sentence_bleu(hypothesis, reference) == pytest.approx(expected, rel=1e-12, abs=1e-15)
        zeros += not any(expected)
        singles += len(hypothesis) == 1
    assert zeros > 50 and singles > 50  # the special cases were among them


def test_exact_match_by_hand():
    words = "a b c d e f".split()  # all p = 1: q_0 = 2, q_1 = 4/3, q_2 = 10/9, q_3 = 28/27, q_4 = 82/81
    q = [4 / 3, 10 / 9, 28 / 27, 82 / 81]
    assert sentence_bleu(words, words) == pytest.approx([math.prod(q[:n]) ** (1 / n) for n in range(1, 5)])


def test_smoothing_and_brevity_by_hand():
    """2 words against 4: p_1 = 1/2, the bigram is missing: ln 2 / 10, then ln 2 / 20, ln 2 / 40; p_5 = 0."""
    p = [1 / 2, math.log(2) / 10, math.log(2) / 20, math.log(2) / 40, 0]
    q1 = (1.5 + p[0] + p[1]) / 3
    q2 = (q1 + p[1] + p[2]) / 3
    found = sentence_bleu("a x".split(), "a b c d".split())
    assert found[:2] == pytest.approx([q1 * math.exp(-1), math.sqrt(q1 * q2) * math.exp(-1)])


def test_special_cases():
    assert sentence_bleu([], ["a"]) == sentence_bleu(["a"], []) == sentence_bleu(["a"], ["b"]) == [0.0] * 4
    one = sentence_bleu(["a"], ["a"])  # p = 1, 0, 0, 0, 0: q = 1, 1/3, 1/9, 1/27
    assert one == pytest.approx([1, (1 / 3) ** (1 / 2), (1 / 27) ** (1 / 3), (1 / 729) ** (1 / 4)])
    assert sentence_bleu([3, 4, 5], [3, 4, 5]) == sentence_bleu("abc", "abc")
    # A word counts as often as the reference has it: p = 1/3, 0, 0 with ln 3 / 10 / 2 for the bigrams …
    q1 = (1 / 3 + 1 + 1 / 3 + math.log(3) / 10 / 2) / 3
    assert sentence_bleu("a a a".split(), "a b c".split())[0] == pytest.approx(q1)


def test_precision_and_recall_by_hand():
    hypotheses, references = ["a", "a b", "x"], ["a", "c"]
    hypotheses, references = ([text.split() for text in texts] for texts in (hypotheses, references))
    ab = sentence_bleu(["a", "b"], ["a"])[0]
    assert 0 < ab < 1  # rows a, ab, x; columns a, c:  1 0 / ab 0 / 0 0
    score = context_bleu(hypotheses, references)
    assert score.precision[0] == pytest.approx((1 + ab + 0) / 3)
    assert score.recall[0] == pytest.approx((1 + 0) / 2)
    assert context_bleu(hypotheses, references[::-1]) == context_bleu(hypotheses[::-1], references) == score

    both = corpus_bleu([hypotheses, [["c"]]], [references, [["c"]]])
    assert both.precision[0] == pytest.approx((score.precision[0] + 1) / 2)
    assert both.recall[3] == pytest.approx((score.recall[3] + sentence_bleu(["c"], ["c"])[3]) / 2)


def test_one_reference_gives_recall_above_precision():
    rng = random.Random(2)
    for _ in range(50):
        hypotheses = [rng.choices("abcdef", k=rng.randint(0, 6)) for _ in range(5)]
        score = context_bleu(hypotheses, [rng.choices("abcdef", k=4)])
        assert all(recall >= precision for precision, recall in zip(*score))


def test_mistakes():
    two = [[["a"]]] * 2
    for hypotheses, references in ([[]], [[["a"]]]), ([[["a"]]], [[]]), ([[["a"]]], []), ([], []), (two, two[:1]):
        with pytest.raises(ValueError):
            corpus_bleu(hypotheses, references)
