"""Word similarity against scipy, by hand, and by the number of pairs that the paper skips on real data."""

import math

import numpy as np
import pytest
import torch
from conftest import make_dictionary
from fairseq.data import Dictionary
from real_data import real_lines, real_path
from scipy import stats

from mixtape_plugin.analysis.word_similarity import SETS, read_folder, read_pairs, similarity, spearman, wins
from mixtape_plugin.errors import UserError

# Parthiban et al. 2021, supplement 3, in the order of SETS.
SKIPPED = {
    "ptb": (116, 66, 80, 55, 21, 146, 346, 1952, 65, 9, 1889, 1746, 424),
    "wikitext2": (48, 28, 28, 20, 4, 106, 99, 863, 43, 0, 1605, 1080, 106),
}


@pytest.mark.parametrize("text, file", [("ptb", "ptb.train.txt"), ("wikitext2", "wiki.train.txt")])
def test_as_many_pairs_are_skipped_as_in_the_paper(text, file):
    sets = read_folder(real_path("word_similarity"))
    dictionary = Dictionary()
    for word in {word for line in real_lines(f"{text}/{file}") for word in line.split()}:
        dictionary.add_symbol(word)
    embedding = torch.randn(len(dictionary), 4)
    found = {name: similarity(embedding, dictionary, pairs) for name, pairs in sets.items()}
    assert list(found) == list(SETS)
    assert tuple(result.skipped for result in found.values()) == SKIPPED[text]
    assert found["EN-WS-353-ALL"].pairs == 353 - SKIPPED[text][0]


@pytest.mark.parametrize("seed", [0, 1])
def test_spearman_is_scipys(seed):
    """With many equals, and several samples at once."""
    x, y = np.random.default_rng(seed).integers(0, 6, (2, 5, 40))
    expected = [stats.spearmanr(*pair).statistic for pair in zip(x, y)]
    np.testing.assert_allclose(spearman(x, y), expected, rtol=1e-12)


def test_similarity_by_hand():
    dictionary = make_dictionary(6)
    vectors = {"w0": (1, 0), "w1": (2, 0), "w2": (0, 3), "w3": (-1, 0), "w4": (1, 1)}
    embedding = torch.zeros(len(dictionary), 2)
    for word, vector in vectors.items():
        embedding[dictionary.index(word)] = torch.tensor(vector, dtype=torch.float32)
    # cosines 1, 0, −1, √½
    pairs = [("w0", "w1", 9.0), ("w0", "w2", 5.0), ("w0", "w3", 1.0), ("w0", "w4", 4.0), ("w0", "unseen", 3.0)]
    found = similarity(embedding, dictionary, pairs)
    assert (found.pairs, found.skipped) == (4, 1)
    assert found.rho == pytest.approx(0.8)  # ranks 4 2 1 3 against 4 3 1 2: 1 − 6·2/(4·15)
    assert found.interval[0] < found.rho <= found.interval[1] <= 1
    assert similarity(embedding, dictionary, pairs) == found
    assert similarity(embedding, dictionary, pairs[1:]).rho == pytest.approx(0.5)  # ranks 2 1 3 against 3 1 2
    assert similarity(embedding, dictionary, pairs[2:]).rho is None
    assert similarity(embedding, dictionary, [(a, b, 1.0) for a, b, _ in pairs]).rho is None


def test_bootstrap_interval_covers_the_truth():
    """ρ of a bivariate normal, in 95% of the samples; somewhat less, as such intervals are known to be short."""
    rng, covered = np.random.default_rng(0), 0
    dictionary = make_dictionary(100)
    truth = 6 / np.pi * np.arcsin(0.6 / 2)
    for _ in range(60):
        x, noise = rng.standard_normal((2, 50))
        y = 0.6 * x + 0.8 * noise
        embedding = torch.zeros(len(dictionary), 2)
        embedding[4:54, 0] = 1.0
        angle = torch.tensor(np.pi * stats.norm.cdf(x))  # the cosine falls with x
        embedding[54:104] = torch.stack([angle.cos(), angle.sin()], 1).float()
        pairs = [(f"w{n}", f"w{n + 50}", -y[n]) for n in range(50)]
        low, high = similarity(embedding, dictionary, pairs).interval
        covered += low <= truth <= high
    assert 51 <= covered <= 59


def test_wins():
    rho = {"a": {"x": 0.1, "y": 0.5, "z": None}, "b": {"x": 0.2, "y": 0.4, "z": 0.3}}
    assert wins(rho, "a", "b") == (1, 2)


def test_a_tie_is_nobodys_win():
    rho = {"a": {"x": 0.5, "y": 0.3}, "b": {"x": 0.5, "y": 0.2}}
    assert wins(rho, "a", "b") == (1, 2) and wins(rho, "b", "a") == (0, 2)


def test_files(tmp_path):
    (tmp_path / "b.txt").write_bytes(b"Tiger\tcat\t7.35\r\ntiger tiger 10\n\n")
    (tmp_path / "EN-MC-30.txt").write_text("a b 1")
    (tmp_path / "readme.md").write_text("no")
    found = read_folder(tmp_path)
    assert list(found) == ["EN-MC-30", "b"] and found["b"] == [("tiger", "cat", 7.35), ("tiger", "tiger", 10.0)]
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfa b 1\n")
    assert read_pairs(tmp_path / "b.txt") == [("a", "b", 1.0)]
    (tmp_path / "b.txt").write_bytes(b"a b 1\ncaf\xe9 b 1\n")
    with pytest.raises(UserError, match="b.txt, line 2 is not UTF-8 text"):
        read_pairs(tmp_path / "b.txt")
    for line in ("a b", "a b c", "a b 1 2", "a b nan"):
        (tmp_path / "b.txt").write_text(f"a b 1\n{line}\n")
        with pytest.raises(UserError) as error:
            read_pairs(tmp_path / "b.txt")
        assert str(error.value) == f"{tmp_path}/b.txt line 2 is not 'word word score': {line}"
    with pytest.raises(UserError, match="holds no .txt file"):
        read_folder(tmp_path / "nowhere")


def test_the_interval_is_as_wide_as_the_formulas():
    """2 · 1.96 · (1 − ρ²)·√((1 + ρ²/2)/n), Bonett and Wright 2000, for 1,000 pairs; one of 90% is a sixth shorter."""
    rng, dictionary = np.random.default_rng(0), make_dictionary(2000)
    x, noise = rng.standard_normal((2, 1000))
    y = 0.6 * x + 0.8 * noise
    angle = torch.tensor(np.pi * stats.norm.cdf(x))
    embedding = torch.zeros(len(dictionary), 2)
    embedding[4:1004, 0] = 1.0
    embedding[1004:2004] = torch.stack([angle.cos(), angle.sin()], 1).float()
    found = similarity(embedding, dictionary, [(f"w{n}", f"w{n + 1000}", -y[n]) for n in range(1000)])
    error = (1 - found.rho**2) * math.sqrt((1 + found.rho**2 / 2) / 1000)
    low, high = found.interval
    assert (high - low) / (2 * 1.96 * error) == pytest.approx(1, abs=0.12)
