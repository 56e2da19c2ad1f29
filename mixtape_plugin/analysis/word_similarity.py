"""How well distances of word embeddings follow people's ratings (Parthiban et al. 2021, figure 4; supplement 3).

Shapes: V vocabulary, E embedding, n pairs, R resamples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Sequence

import numpy as np
from fairseq.data import Dictionary
from scipy.stats import rankdata
from torch import Tensor

from mixtape_plugin.errors import UserError
from mixtape_plugin.files import read_lines
from mixtape_plugin.tables import table

# In the order of the paper's supplement; other files of a folder follow.
SETS = (
    "EN-WS-353-ALL", "EN-WS-353-SIM", "EN-WS-353-REL", "EN-RG-65", "EN-MC-30", "EN-MTurk-287", "EN-MTurk-771",
    "EN-MEN-TR-3k", "EN-YP-130", "EN-VERB-143", "EN-RW-STANFORD", "EN-SimVerb-3500", "EN-SIMLEX-999",
)  # fmt: skip
FEWEST_PAIRS = 3
RESAMPLES = 1000
SEED = 1  # of the samples


@dataclass
class Similarity:
    """Of one set: Spearman's ρ, its 95% bootstrap interval, and how many pairs counted or were skipped.

    ρ and the interval are None where fewer than 3 pairs have both words in the dictionary, or a side is constant.
    """

    rho: float | None
    interval: tuple | None
    pairs: int
    skipped: int


def read_pairs(path: str | Path) -> list:
    """(word, word, score) of a file "word word score", tabs or blanks between them, in lower case.

    Raises:
        UserError: the file cannot be read, is empty or no UTF-8, or a line is something else.
    """
    pairs = []
    for number, line in enumerate(read_lines(path), 1):
        try:
            if line.strip():
                first, second, score = line.lower().split()
                pairs.append((first, second, float(score)))
                if not math.isfinite(pairs[-1][2]):
                    raise ValueError
        except ValueError:
            raise UserError(f"{path} line {number} is not 'word word score': {line.strip()[:60]}") from None
    return pairs


def read_folder(folder: str | Path) -> dict:
    """Name of a set -> its pairs, for each ``.txt`` file; raises UserError where there is none."""
    paths = {path.stem: path for path in sorted(Path(folder).glob("*.txt"))}
    if not paths:
        raise UserError(f"--pairs {folder} holds no .txt file: give a folder of files 'word word score'")
    names = [name for name in SETS if name in paths]
    names += [name for name in paths if name not in SETS]
    return {name: read_pairs(paths[name]) for name in names}


def spearman(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Pearson's r of the ranks, equals sharing their mean rank, along the last axis; NaN where a side is constant."""
    ranks = [rankdata(side, axis=-1) for side in (x, y)]
    x, y = (side - side.mean(-1, keepdims=True) for side in ranks)
    with np.errstate(invalid="ignore", divide="ignore"):
        return (x * y).sum(-1) / np.sqrt((x * x).sum(-1) * (y * y).sum(-1))


def cosines(embedding: Tensor, ids: np.ndarray) -> np.ndarray:
    """Of each pair of rows, [n], in float64.

    Args:
        embedding: [V, E], a tensor.
        ids: [n, 2]
    """
    first, second = (embedding[ids[:, side]].double().cpu().numpy() for side in (0, 1))
    norms = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    return (first * second).sum(1) / norms


def similarity(embedding: Tensor, dictionary: Dictionary, pairs: Sequence[tuple]) -> Similarity:
    """ρ between the cosine of two words' embeddings and their score, over the pairs whose words are both known.

    A pair that stands twice in a set counts twice. The interval is between the 2.5% and 97.5% quantiles of ρ over 1,000
    samples of as many pairs, drawn with replacement: it says how far the choice of pairs moves ρ, and nothing of seeds.

    Differs from the authors' code, which adds 1e-6 to the stored vectors at each comparison, so that ρ depends on the
    order of the sets, counts a repeated pair once, and takes ρ = 0 where no pair is found.

    Args:
        embedding: [V, E].
        dictionary: fairseq's; pairs are in lower case, and looked up as they are.
    """
    known = [(a, b, score) for a, b, score in pairs if a in dictionary and b in dictionary]
    skipped = len(pairs) - len(known)
    if len(known) < FEWEST_PAIRS:
        return Similarity(None, None, len(known), skipped)
    ids = np.array([[dictionary.index(a), dictionary.index(b)] for a, b, _ in known])
    model, people = cosines(embedding, ids), np.array([score for *_, score in known])
    rho = float(spearman(model, people))
    if not np.isfinite(rho):
        return Similarity(None, None, len(known), skipped)
    sample = np.random.default_rng(SEED).integers(len(known), size=(RESAMPLES, len(known)))
    resampled = spearman(model[sample], people[sample])
    low, high = np.quantile(resampled[np.isfinite(resampled)], [0.025, 0.975])
    return Similarity(rho, (float(low), float(high)), len(known), skipped)


def wins(rho: dict, first: str, second: str) -> tuple:
    """On how many sets the first model's ρ is above the second's, and on how many both have one.

    Args:
        rho: model -> set -> ρ or None.
    """
    both = [name for name in rho[first] if None not in (rho[first][name], rho[second][name])]
    return sum(rho[first][name] > rho[second][name] for name in both), len(both)


def markdown(found: dict) -> str:
    """ρ of each set and model with its interval, and where there are several models, who wins how often.

    Args:
        found: model -> set -> :class:`Similarity`.
    """
    first, blank = next(iter(found.values())), ""

    def cell(result):
        return "n/a" if result.rho is None else "{:.3f} [{:.2f}, {:.2f}]".format(result.rho, *result.interval)

    lines = [[s, str(first[s].pairs), str(first[s].skipped), *(cell(f[s]) for f in found.values())] for s in first]
    text = table(["set", "pairs", "skipped", *found], lines)
    text += "\nSpearman's ρ, with the 95% interval of 1,000 bootstrap samples of the pairs.\n"
    if len(found) > 1:
        rho = {name: {s: result.rho for s, result in results.items()} for name, results in found.items()}
        lines = [[a, *(blank if a == b else "{} of {}".format(*wins(rho, a, b)) for b in found)] for a in found]
        text += f"\nSets on which the row's ρ is above the column's:\n\n{table([blank, *found], lines)}"
    return text
