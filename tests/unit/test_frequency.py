"""The loss of frequent and of rare tokens, and how far two models' parts of it lie apart."""

import math
from itertools import accumulate

import pytest
import torch
from fairseq.data import Dictionary

from mixtape_plugin.analysis.frequency import by_frequency, classes, markdown
from mixtape_plugin.analysis.trained_model import Text


def text_of(lines, counts):
    dictionary = Dictionary()
    for word, count in counts.items():
        dictionary.add_symbol(word, count)
    tokens = [[*map(dictionary.index, line.split()), dictionary.eos()] for line in lines]
    return Text(torch.tensor(sum(tokens, [])), [0, *accumulate(map(len, tokens))], dictionary)


def test_classes_by_counts_in_any_order():
    text = text_of([], {f"w{n}": n for n in range(1, 36)})  # w35 is the most frequent
    names, of_token = classes(text)
    assert names == ["special", "1–10", "11–30", "31–100"]
    found = {text.dictionary[i]: names[c] for i, c in enumerate(of_token)}
    assert [found[w] for w in ("w35", "w26", "w25", "w6", "w5", "w1")] == [
        "1–10", "1–10", "11–30", "11–30", "31–100", "31–100",
    ]  # fmt: skip
    assert {found[w] for w in ("</s>", "<unk>", "<pad>")} == {"special"}


def test_classes_go_on_to_the_last_token():
    assert classes(text_of([], {f"w{n}": 1 for n in range(3001)}))[0] == [
        "special", "1–10", "11–30", "31–100", "101–300", "301–1,000", "1,001–3,000", "3,001–10,000",
    ]  # fmt: skip


def test_parts_of_the_loss():
    text = text_of(["a b", "a r r"], {"a": 90, "b": 80, **{f"x{n}": 50 for n in range(10)}, "r": 1})
    losses = {
        "first": torch.tensor([1.0, 2.0, 0.1, 3.0, 4.0, 5.0, 0.3]),
        "second": torch.tensor([1.0, 1.0, 0.1, 3.0, 6.0, 6.0, 0.3]),
    }
    rows = by_frequency(losses, text)
    assert [(row["rank"], row["tokens"], row["training"]) for row in rows] == [
        (rank, tokens, model)
        for rank, tokens in (("special", 2), ("1–10", 3), ("11–30", 2), ("all", 7))
        for model in ("first", "second")
    ]
    first, second = rows[4:6]  # r
    assert first == {
        "rank": "11–30", "tokens": 2, "training": "first", "nats": 9 / 7,
        "perplexity": pytest.approx(math.exp(4.5)),
    }  # fmt: skip
    gaps = [0, 0, 0, 0, 2, 1, 0]
    sd = (sum((gap - 3 / 7) ** 2 for gap in gaps) / 7) ** 0.5
    assert second["difference"] == pytest.approx(3 / 7)
    assert second["interval"] == pytest.approx(1.96 * sd / 7**0.5)
    for model, loss in losses.items():
        of_model = [row for row in rows if row["training"] == model]
        total = of_model.pop()
        assert sum(row["nats"] for row in of_model) == pytest.approx(total["nats"]) == pytest.approx(loss.mean().item())
    shown = markdown(rows).splitlines()
    assert shown[0] == "| rank | targets | first: ppl | second: ppl | first: nats | second: difference |"
    assert shown[-1].startswith("| all | 7 | 9.03 | 12.01 | 2.200 | +0.286 ± ")
