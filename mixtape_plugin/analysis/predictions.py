"""What models predict at chosen positions of a text, side by side (Yang et al. 2018, appendix C.4; Parthiban et al.
2021, figure 3), and how often they are right everywhere.

Shapes: N contexts, V vocabulary, k predictions.
"""

from __future__ import annotations

import math
import random
import re
from bisect import bisect_right
from dataclasses import dataclass
from typing import Callable, Iterator

import torch
from torch import Tensor

from mixtape_plugin.analysis.trained_model import Text, TrainedModel
from mixtape_plugin.errors import UserError
from mixtape_plugin.evaluation.language_model import Score
from mixtape_plugin.tables import table

WORDS_AROUND = 100  # of a position, on either side; sentences are shorter
# Line:word, both from 1, in the test text of the Penn Treebank, and the word there where the paper names it.
PAPER_POSITIONS = {
    "Yang et al.": {
        "124:25": "tons", "934:19": "a", "3748:8": "african", "23:20": "ual", "3753:20": "conspiracy",
        "2971:22": "subsidies",
    },
    "Parthiban et al., chosen": dict.fromkeys(["1420:6", "1605:4", "1743:23", "2131:12", "2525:8", "2641:41"]),
    "Parthiban et al., random": dict.fromkeys(["828:3", "1252:33", "2249:46", "3048:23", "1887:3", "2724:23"]),
}  # fmt: skip


@dataclass
class Predictions:
    """One model's at every position: its k likeliest tokens, descending, [N, k]; their log p, [N, k]; and log p of
    each target, [N]; in nats."""

    tokens: Tensor
    log_probs: Tensor
    target_log_probs: Tensor


def top_tokens(log_probs: Tensor, k: int) -> tuple:
    """The k likeliest tokens of each context and their log p, [N, k] each, for log P [N, V]; of equals the lower id."""
    rest, tokens = log_probs.clone(), []
    for _ in range(k):
        tokens.append(rest.argmax(-1, keepdim=True))  # the first of equals
        rest.scatter_(-1, tokens[-1], -torch.inf)
    tokens = torch.cat(tokens, -1)
    return tokens, log_probs.gather(-1, tokens)


def predict(trained: TrainedModel, split: str, k: int, progress: Callable[[int], object]) -> Predictions:
    """One walk through a text in its order; ``progress`` is called with the number of contexts of each step."""
    parts = []
    for log_probs, targets in trained.log_probs(split):
        target_log_probs = log_probs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        parts.append([part.cpu() for part in (*top_tokens(log_probs, k), target_log_probs)])
        progress(len(targets))
    return Predictions(*map(torch.cat, zip(*parts)))


def hits(predictions: Predictions, targets: Tensor, k: int | None = None) -> Tensor:
    """Where the target is among the k likeliest tokens (all that were kept, unless given), [N]."""
    return predictions.tokens[:, :k].eq(targets.unsqueeze(-1)).any(-1)


def index_of(text: Text, position: str, option: str) -> int:
    """The context of a position, LINE:WORD from 1, </s> being a line's last word.

    Raises:
        UserError: it is written otherwise, or the text has no such line or word.
    """
    found = re.fullmatch(r"(\d+):(\d+)", position)
    if not found:
        raise UserError(f"{option} {position} is not allowed: LINE:WORD, such as 124:25, both from 1")
    line, word = int(found[1]), int(found[2])
    if not 1 <= line < len(text.starts):
        raise UserError(f"{option} {position} is not in the text: it has lines 1 to {len(text.starts) - 1:,}")
    words = text.starts[line] - text.starts[line - 1]
    if not 1 <= word <= words:
        raise UserError(f"{option} {position} is not in the text: that line has words 1 to {words}")
    return text.starts[line - 1] + word - 1


def paper_positions(text: Text) -> dict:
    """Title -> contexts of the papers' 18 positions; raises UserError where the text is not the one they are in."""
    groups = {}
    for title, positions in PAPER_POSITIONS.items():
        groups[title] = [index_of(text, position, "--paper:") for position in positions]
        for index, (position, word) in zip(groups[title], positions.items()):
            found = text.dictionary[text.targets[index]]
            if word not in (None, found):
                raise UserError(f"--paper is for the test text of the Penn Treebank: {position} is {found}, not {word}")
    return groups


def random_positions(text: Text, count: int, seed: int) -> list:
    """Different contexts, drawn from all of the text, in its order."""
    return sorted(random.Random(seed).sample(range(len(text)), min(count, len(text))))


def where_better(predictions: Predictions, others: Predictions, count: int) -> list:
    """The contexts in which a model's loss is lowest beside another's, the clearest first."""
    gain = predictions.target_log_probs.double() - others.target_log_probs.double()
    return gain.argsort(descending=True, stable=True)[:count].tolist()


def line_of(text: Text, index: int) -> tuple:
    """Line and word of a context, both from 0."""
    line = bisect_right(text.starts, index) - 1
    return line, index - text.starts[line]


def context_of(text: Text, index: int) -> str:
    """The sentence before (a translation's source), and the sentence with the token to be predicted in bold.

    Of a line that is longer than sentences are, such as all of text8, the words around the token.
    """
    line, word = line_of(text, index)
    words = text.words(line)
    words[word] = f"**{words[word]}**"
    words = words[max(word - WORDS_AROUND, 0) : word + WORDS_AROUND + 1]
    before = text.sources[line] if text.sources else text.words(line - 1)[-WORDS_AROUND:] if line else []
    return " ".join([*before, *([] if not before else ["/"]), *words])


def label_of(text: Text, index: int) -> str:
    """LINE:WORD of a context, both from 1."""
    line, word = line_of(text, index)
    return f"{line + 1}:{word + 1}"


def side_by_side(found: dict, text: Text, index: int) -> str:
    """A position in Markdown: where it is, the words around it, and the likeliest of each model, the true one bold.

    Args:
        found: model -> :class:`Predictions`.
    """
    target, k = text.targets[index], next(iter(found.values())).tokens.size(1)
    lines = []
    for name, p in found.items():
        words = zip(p.tokens[index], p.log_probs[index].exp().tolist())
        bold = "**{}** {:.2f}".format
        plain = "{} {:.2f}".format
        lines.append([name, *((bold if token == target else plain)(text.dictionary[token], q) for token, q in words)])
    header = ["training", *map(str, range(1, k + 1))]
    return f"{label_of(text, index)}: {context_of(text, index)}\n\n{table(header, lines)}"


def rows(found: dict, text: Text, groups: dict) -> Iterator[dict]:
    """A row for each word that a model predicts at a position of these groups (title -> contexts)."""
    for title, positions in groups.items():
        for index in positions:
            place = {"group": title, "position": label_of(text, index)}
            place["reference"] = text.dictionary[text.targets[index]]
            for name, p in found.items():
                for number, (token, log_prob) in enumerate(zip(p.tokens[index], p.log_probs[index].tolist()), 1):
                    word = {"rank": number, "word": text.dictionary[token], "probability": math.exp(log_prob)}
                    yield {**place, "training": name, **word}


def hit_rates(found: dict, text: Text) -> list:
    """A row for each model: perplexity; in percent of all positions, where the true word is the likeliest, where it is
    among the k likeliest, and where it is among them and not among another model's."""
    right, k = {name: hits(p, text.targets) for name, p in found.items()}, next(iter(found.values())).tokens.size(1)
    rates = []
    for name, p in found.items():
        row = {"training": name, "perplexity": Score(-p.target_log_probs.double().sum().item(), len(text)).perplexity}
        row["top-1 %"] = percent(hits(p, text.targets, 1))
        row[f"top-{k} %"] = percent(right[name])
        if len(found) > 1:
            row.update((f"not {other} %", percent(right[name] & ~hit)) for other, hit in right.items())
        rates.append(row)
    return rates


def percent(truths: Tensor) -> float:
    return 100 * truths.double().mean().item()
