"""Positions of a text, the likeliest words there, and the papers' positions in the Penn Treebank."""

import math
from itertools import accumulate, chain

import pytest
import torch
from conftest import make_dictionary
from fairseq.data import Dictionary
from real_data import real_lines

from mixtape_plugin.analysis.predictions import (
    WORDS_AROUND,
    Predictions,
    context_of,
    hit_rates,
    index_of,
    label_of,
    paper_positions,
    random_positions,
    rows,
    side_by_side,
    top_tokens,
    where_better,
)
from mixtape_plugin.analysis.trained_model import Text
from mixtape_plugin.errors import UserError


def text_of(lines, **more):
    """A text of these lines of words, each ending in </s>."""
    dictionary = make_dictionary(9)
    tokens = [[*map(dictionary.index, line.split()), dictionary.eos()] for line in lines]
    starts = [0, *accumulate(map(len, tokens))]
    return Text(torch.tensor([*chain(*tokens)]), starts, dictionary, **more)


TEXT = text_of(["w1 w2", "w3", "w1 w4 w5"])


def test_positions():
    at = {label_of(TEXT, index): TEXT.dictionary[token] for index, token in enumerate(TEXT.targets)}
    assert at == {
        "1:1": "w1", "1:2": "w2", "1:3": "</s>", "2:1": "w3", "2:2": "</s>",
        "3:1": "w1", "3:2": "w4", "3:3": "w5", "3:4": "</s>",
    }  # fmt: skip
    for index, label in enumerate(at):
        assert index_of(TEXT, label, "--at") == index
    assert context_of(TEXT, 6) == "w3 </s> / w1 **w4** w5 </s>"
    assert context_of(TEXT, 0) == "**w1** w2 </s>"
    assert context_of(text_of(["w1"], sources=[["a", "b"]]), 0) == "a b / **w1** </s>"
    one_line = text_of([" ".join(["w1"] * 500)])
    assert context_of(one_line, 250) == f"{'w1 ' * WORDS_AROUND}**w1**{' w1' * WORDS_AROUND}"


@pytest.mark.parametrize(
    "position, sentence",
    [
        ("4:1", "--at 4:1 is not in the text: it has lines 1 to 3"),
        ("0:1", "--at 0:1 is not in the text: it has lines 1 to 3"),
        ("2:3", "--at 2:3 is not in the text: that line has words 1 to 2"),
        ("2:0", "--at 2:0 is not in the text: that line has words 1 to 2"),
        ("2", "--at 2 is not allowed: LINE:WORD, such as 124:25, both from 1"),
        ("-1:2", "--at -1:2 is not allowed: LINE:WORD, such as 124:25, both from 1"),
    ],
)
def test_positions_that_are_none(position, sentence):
    with pytest.raises(UserError) as error:
        index_of(TEXT, position, "--at")
    assert str(error.value) == sentence


def test_random_positions():
    assert random_positions(TEXT, 4, 1) == random_positions(TEXT, 4, 1) != random_positions(TEXT, 4, 3)
    assert random_positions(TEXT, 100, 1) == list(range(9))


def test_likeliest_words_and_ties_by_id():
    log_probs = torch.tensor([[0.0, -1, -1, -1, -2], [-5, -5, -5, -5, -5], [-1, 0, -torch.inf, -torch.inf, -3]])
    tokens, values = top_tokens(log_probs, 3)
    assert tokens.tolist() == [[0, 1, 2], [0, 1, 2], [1, 0, 4]]
    assert values.tolist() == [[0, -1, -1], [-5, -5, -5], [0, -1, -3]]
    large = torch.randn(40, 500, generator=torch.Generator().manual_seed(0))
    assert top_tokens(large, 7)[0].tolist() == large.sort(descending=True).indices[:, :7].tolist()


def predictions_of(tokens, target_log_probs):
    tokens = torch.tensor(tokens)
    return Predictions(tokens, torch.tensor([[0.5, 0.25]]).log().expand(tokens.shape), torch.tensor(target_log_probs))


def test_hit_rates_by_hand():
    text = text_of(["w1 w2 w3"])
    one, two, three, end = text.targets.tolist()
    found = {
        "a": predictions_of([[one, two], [one, two], [one, two], [end, one]], [-1.0, -2, -3, -2]),
        "b": predictions_of([[two, three], [one, two], [two, three], [one, two]], [-2.0, -1, -1, -9]),
    }
    a, b = hit_rates(found, text)
    assert a == {
        "training": "a", "perplexity": pytest.approx(7.38905609893), "top-1 %": 50, "top-2 %": 75, "not a %": 0,
        "not b %": 50,
    }  # fmt: skip
    assert (b["top-1 %"], b["top-2 %"], b["not a %"], b["not b %"]) == (0, 50, 25, 0)
    assert where_better(found["a"], found["b"], 2) == [3, 0] and where_better(found["b"], found["a"], 2) == [2, 1]
    lines = side_by_side(found, text, 1).splitlines()
    assert lines == [
        "1:2: w1 **w2** w3 </s>", "", "| training | 1 | 2 |", "| --- | --- | --- |",
        "| a | w1 0.50 | **w2** 0.25 |", "| b | w1 0.50 | **w2** 0.25 |",
    ]  # fmt: skip
    table = list(rows(found, text, {"x": [2]}))
    assert [(r["training"], r["rank"], r["word"]) for r in table] == [
        ("a", 1, "w1"), ("a", 2, "w2"), ("b", 1, "w2"), ("b", 2, "w3"),
    ]  # fmt: skip
    assert {(r["group"], r["position"], r["reference"]) for r in table} == {("x", "1:3", "w3")}


def test_where_a_model_is_better_by_as_much_the_first_comes_first():
    """Enough ties that a sort that is not stable would show."""
    better, level = (predictions_of([[4, 5]] * 1000, [value] * 1000) for value in (-1.0, -2.0))
    better.target_log_probs[500] = 0.0
    assert where_better(better, level, 100) == [500, *range(99)]


def test_perplexity_of_a_model_that_diverged_is_infinite():
    text = text_of(["w1"])
    found = {"a": predictions_of([text.targets.tolist()] * 2, [-1e5, -1e5])}
    assert hit_rates(found, text)[0]["perplexity"] == math.inf


def test_positions_of_the_papers_are_of_one_text():
    with pytest.raises(UserError, match="--paper: 124:25 is not in the text: it has lines 1 to 3"):
        paper_positions(TEXT)
    long = text_of(["w1 " * 50] * 4000)
    with pytest.raises(UserError, match="--paper is for the test text of the Penn Treebank: 124:25 is w1, not tons"):
        paper_positions(long)


def test_positions_of_the_papers_are_in_the_penn_treebank():
    """The references of Yang et al.'s C.4, and that all 18 are words of the text."""
    lines = [line.split() for line in real_lines("ptb/ptb.test.txt")]
    dictionary, tokens, starts = Dictionary(), [], [0]
    for line in lines:
        tokens += [*map(dictionary.add_symbol, line), dictionary.eos()]
        starts.append(len(tokens))
    assert len(tokens) == 82_430
    text = Text(torch.tensor(tokens), starts, dictionary)
    groups = paper_positions(text)
    assert [len(positions) for positions in groups.values()] == [6, 6, 6]
    words = [[dictionary[text.targets[index]] for index in positions] for positions in groups.values()]
    assert words[0] == ["tons", "a", "african", "ual", "conspiracy", "subsidies"]
    assert all(dictionary[text.targets[index]] != "</s>" for positions in groups.values() for index in positions)


def test_the_line_before_is_cut_too():
    two_lines = text_of([" ".join(["w1"] * 500), "w2"])
    assert context_of(two_lines, 501) == f"{'w1 ' * (WORDS_AROUND - 1)}</s> / **w2** </s>"
