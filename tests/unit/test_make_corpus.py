"""The quickstart's corpus is what its description says: a random table of full rank, and text drawn from it."""

import json
import math
from collections import Counter

import numpy as np
import pytest
import torch
from recipes import load_script

from mixtape_plugin.analysis.rank import log_prob_rank
from mixtape_plugin.errors import UserError

make_corpus = load_script("make_corpus")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    make_corpus.write_corpus(folder, seed=3, sizes={"train": 40000, "valid": 20, "test": 300})
    return folder


def read(path):
    return [line.split() for line in path.read_text().splitlines()]


def word_numbers(consonants, count):
    return {word: number for number, word in enumerate(make_corpus.invent_words(consonants, count))}


SOURCE = word_numbers("bdfgklmn", make_corpus.SOURCE_WORDS)
TARGET = word_numbers("prstvwz", make_corpus.TARGET_WORDS)


def test_same_seed_same_bytes(tmp_path):
    def files(name, seed):
        (tmp_path / name).mkdir()
        make_corpus.write_corpus(tmp_path / name, seed, {"train": 50, "valid": 20, "test": 20})
        return {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}

    first, again, other = files("first", 1), files("again", 1), files("other", 7)
    assert first == again
    assert all(first[name] != other[name] for name in first)


def test_command_refuses_bad_options(tmp_path):
    for options, message in [
        (["--train", "0"], "--train 0 is not allowed: at least 1"),
        (["--seed", "-1"], "--seed -1 is not allowed: at least 0"),
        (["--out", str(tmp_path)], "exists; choose a new folder"),
    ]:
        with pytest.raises(UserError) as refusal:
            make_corpus.main(["--out", str(tmp_path / "out"), *options])
        assert message in str(refusal.value) and "\n" not in str(refusal.value)
    assert not list(tmp_path.iterdir())


def test_folders_of_other_names_stay(tmp_path):
    (tmp_path / "corpus.part").mkdir()
    (tmp_path / "corpus.part" / "file").write_text("the user's")
    make_corpus.main(["--out", str(tmp_path / "corpus"), "--train", "5", "--valid", "2", "--test", "2"])
    assert (tmp_path / "corpus.part" / "file").read_text() == "the user's"
    assert {path.name for path in tmp_path.iterdir()} == {"corpus", "corpus.part"}


def test_words_differ():
    assert len(SOURCE) == make_corpus.SOURCE_WORDS and len(TARGET) == make_corpus.TARGET_WORDS
    assert not SOURCE.keys() & TARGET.keys()


def test_true_distribution_is_of_full_rank():
    log_probs = make_corpus.true_log_probs(3)
    np.testing.assert_allclose(np.exp(log_probs).sum(1), 1, rtol=1e-12)
    assert log_prob_rank(torch.from_numpy(log_probs)) == min(make_corpus.SOURCE_WORDS, make_corpus.TARGET_WORDS)


def test_text_follows_the_table(corpus):
    """Counts against expected counts by Pearson's chi-square, cells of 5 and more; mean 1 and σ = √(2/df) if true."""
    counts, pairs = np.zeros((make_corpus.SOURCE_WORDS, make_corpus.TARGET_WORDS)), 0
    for source, target in zip(read(corpus / "train.src"), read(corpus / "train.tgt")):
        assert len(source) == len(target) and make_corpus.MIN_WORDS <= len(source) <= make_corpus.MAX_WORDS
        pairs += len(source)
        for a, b in zip(source, target):
            counts[SOURCE[a], TARGET[b]] += 1
    assert counts.sum() == pairs
    expected = np.exp(make_corpus.true_log_probs(3)) * counts.sum(1, keepdims=True)
    cells = expected >= 5
    chi_square, free = ((counts - expected)[cells] ** 2 / expected[cells]).sum(), cells.sum()
    # rows whose small cells are left out keep nearly as many degrees of freedom as cells: variance p(1-p)n < pn
    assert chi_square < free * (1 + 5 * math.sqrt(2 / free))
    assert chi_square > (free - make_corpus.SOURCE_WORDS) * (1 - 5 * math.sqrt(2 / free))
    assert counts[expected < 1e-9].sum() == 0


def test_likeliest_translations_and_true_perplexity(corpus):
    log_probs = make_corpus.true_log_probs(3)
    nll = tokens = 0
    rows = zip(*(read(corpus / name) for name in ("test.src", "test.tgt", "test.likeliest.tgt")))
    for source, target, likeliest in rows:
        assert [TARGET[b] for b in likeliest] == [int(log_probs[SOURCE[a]].argmax()) for a in source]
        nll -= sum(log_probs[SOURCE[a], TARGET[b]] for a, b in zip(source, target))
        tokens += len(target) + 1  # and </s>, of probability 1
    truth = json.loads((corpus / "truth.json").read_text())
    assert truth["perplexity"] == pytest.approx(math.exp(nll / tokens), rel=1e-9)
    assert truth["rank"] == log_prob_rank(torch.from_numpy(log_probs))


def test_splits_are_drawn_apart(corpus):
    first = {split: (corpus / f"{split}.src").read_text().splitlines()[:20] for split in ("train", "valid", "test")}
    assert len({tuple(lines) for lines in first.values()}) == 3
    frequency = Counter(word for line in read(corpus / "train.tgt") for word in line)
    assert max(frequency.values()) > 2 * min(frequency.values())  # gate sharing would need an order by frequency


def test_a_corpus_is_whole_or_not_there(tmp_path, monkeypatch):
    def full(folder, seed, sizes):
        (folder / "train.src").write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(make_corpus, "write_corpus", full)
    with pytest.raises(UserError, match=f"--out {tmp_path}/corpus cannot be written: No space left on device"):
        make_corpus.main(["--out", str(tmp_path / "corpus")])
    assert not list(tmp_path.iterdir())
