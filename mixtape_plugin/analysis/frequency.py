"""Where a model's loss comes from: from which targets, frequent ones or rare ones.

Shapes: N contexts, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mixtape_plugin.analysis.trained_model import Text
from mixtape_plugin.evaluation.language_model import Score
from mixtape_plugin.tables import table

COLUMNS = ("rank", "tokens", "training", "perplexity", "nats", "difference", "interval")
SPECIAL, ALL = "special", "all"  # classes: </s> and <unk>; every token
NORMAL_95 = 1.96  # standard errors on either side of a mean


def edges(vocab_size: int) -> list[int]:
    """10, 30, 100, 300, …: the last rank of each class of tokens, up to the first that is at least V."""
    found = [10]
    while found[-1] < vocab_size:
        found.append(found[-1] * 3 if str(found[-1])[0] == "1" else found[-1] // 3 * 10)
    return found


def classes(text: Text) -> tuple[list[str], Tensor]:
    """Names of the classes of tokens, and the class of each token of the dictionary, [V].

    A token's rank is its place in the dictionary's counts, from 1; of equals the lower id. They are those of the text
    that the dictionary was made of: the training text, of both its languages where these share a dictionary, or, of
    Penn Treebank, WikiText-2 and text8, all three texts. Special symbols, of which a text has </s> and <unk>, are a
    class of their own.
    """
    dictionary = text.dictionary
    counts = torch.tensor(dictionary.count[dictionary.nspecial :])
    ranks = torch.empty_like(counts)
    ranks[counts.argsort(descending=True, stable=True)] = torch.arange(1, len(counts) + 1)
    last = edges(len(counts))
    names = [f"{low + 1:,}–{high:,}" for low, high in zip([0, *last], last)]
    of_words = torch.bucketize(ranks, torch.tensor(last)) + 1
    return [SPECIAL, *names], torch.cat([of_words.new_zeros(dictionary.nspecial), of_words])


def members(text: Text) -> dict[str, Tensor]:
    """Class -> which targets are of it, [N], for those classes that the text has; the last is all of them."""
    names, of_token = classes(text)
    of_target = of_token[text.targets]
    found = {name: of_target.eq(number) for number, name in enumerate(names)}
    found[ALL] = torch.ones_like(of_target, dtype=torch.bool)
    return {name: here for name, here in found.items() if here.any()}


def by_frequency(losses: dict, text: Text) -> list[dict]:
    """A row for each class of tokens that the text has, and each model; the last are of all tokens.

    Args:
        losses: model -> −log p of each target, [N], in nats.

    Returns:
        rows of ``rank`` (the class), ``tokens`` (how many targets), ``training`` (the model), ``perplexity`` of these
        targets, ``nats`` (their part in the mean loss of all N, so that the parts of the classes sum to it), and, for
        all models but the first, ``difference``, of nats from the first model's, and ``interval``: half of the 95%
        interval of this difference over targets as if they were drawn independently. It knows nothing of other seeds.
    """
    n = len(text)
    losses = {model: loss.double() for model, loss in losses.items()}
    first = next(iter(losses.values()))
    found = []
    for name, here in members(text).items():
        tokens = int(here.sum())
        for number, (model, loss) in enumerate(losses.items()):
            row = {"rank": name, "tokens": tokens, "training": model}
            nll = loss[here].sum().item()
            row["perplexity"], row["nats"] = Score(nll, tokens).perplexity, nll / n
            if number:
                gap = torch.where(here, loss - first, 0.0)
                row["difference"] = gap.mean().item()
                row["interval"] = NORMAL_95 * gap.std(unbiased=False).item() / n**0.5
            found.append(row)
    return found


def markdown(rows: list[dict]) -> str:
    """A table: a line for each class, its targets, and each model's perplexity and part of the loss, or how far that
    part is from the first model's."""
    models = list(dict.fromkeys(row["training"] for row in rows))
    header = ["rank", "targets", *(f"{m}: ppl" for m in models), f"{models[0]}: nats"]
    header += [f"{m}: difference" for m in models[1:]]
    lines = []
    for name in dict.fromkeys(row["rank"] for row in rows):
        here = [row for row in rows if row["rank"] == name]
        line = [name, f"{here[0]['tokens']:,}", *(f"{row['perplexity']:,.2f}" for row in here)]
        line += [f"{here[0]['nats']:.3f}", *(f"{r['difference']:+.3f} ± {r['interval']:.3f}" for r in here[1:])]
        lines.append(line)
    return table(header, lines)
