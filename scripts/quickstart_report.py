#!/usr/bin/env python3
"""The table at the end of quickstart.sh, on the terminal and in table.md and table.csv.

python scripts/quickstart_report.py quickstart-output softmax mixtape
"""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
from pathlib import Path

import start
import torch

from mixtape_plugin.analysis.rank import log_prob_rank
from mixtape_plugin.analysis.trained_model import load
from mixtape_plugin.errors import UserError
from mixtape_plugin.evaluation.language_model import Score
from mixtape_plugin.files import write_csv, write_text
from mixtape_plugin.tables import table

MAX_CONTEXTS = 2000
COLUMNS = ("output layer", "BLEU", "test perplexity", "rank of log P", "parameters", "training tokens/s")


def measure(folder: Path, data: Path) -> tuple[float, torch.Tensor, int]:
    """Measures one trained model on the whole test set, each target counted once (</s> included).

    Returns:
        the mean negative log-likelihood in nats; log P [N, V] in at most ``MAX_CONTEXTS`` contexts, evenly spread over
        the set; the model's number of parameters.
    """
    trained = load(folder, str(data), "checkpoint_last.pt")
    total = len(trained.read("test"))
    chosen = torch.zeros(total, dtype=torch.bool)
    chosen[torch.linspace(0, total - 1, min(total, MAX_CONTEXTS), dtype=torch.float64).long()] = True
    nll, done, rows = 0.0, 0, []
    for log_probs, targets in trained.log_probs("test"):
        nll -= log_probs.gather(1, targets.unsqueeze(1)).double().sum().item()
        rows.append(log_probs[chosen[done : done + len(targets)]])
        done += len(targets)
    assert done == total, f"{done} of {total} targets were measured"
    return nll / total, torch.cat(rows), sum(p.numel() for p in trained.model.parameters())


def row(out: Path, layer: str) -> tuple[list, dict, int, int]:
    """What one training reached, BLEU with its signature, and the numbers of contexts and tokens of the rank."""
    nll, log_probs, parameters = measure(out / layer, out / "data-bin")
    log = (out / layer / "train.log").read_text(encoding="utf-8")
    speeds = [float(wps) for wps in re.findall(r"train_inner.*?wps=([\d.]+)", log)]
    bleu = json.loads((out / layer / "score.json").read_text(encoding="utf-8"))[0]
    speed = f"{statistics.median(speeds):,.0f}" if speeds else "–"
    rank = log_prob_rank(log_probs)
    cells = [layer, f"{bleu['score']:.1f}", f"{Score(nll, 1).perplexity:.2f}", rank, f"{parameters:,}", speed]
    return cells, bleu, len(log_probs), log_probs.size(1)


def main() -> None:
    if len(sys.argv) < 3 or not os.path.isdir(sys.argv[1]):
        raise UserError("usage: quickstart_report.py DIR LAYER..., the folder that quickstart.sh wrote and its layers")
    out = Path(sys.argv[1])
    rows = []
    for layer in sys.argv[2:]:
        cells, bleu, contexts, vocab_size = row(out, layer)
        rows.append(cells)
    truth = out / "text" / "truth.json"
    if truth.exists():
        true = json.loads(truth.read_text(encoding="utf-8"))
        rows.append(["the truth", "100.0", f"{true['perplexity']:.2f}", true["rank"], "", ""])

    against = "the likeliest translations" if truth.exists() else "the references"
    text = (
        f"{table(COLUMNS, (map(str, cells) for cells in rows))}\n"
        f"BLEU against {against}: {bleu['metric']}, {bleu['signature']}\n"
        f"Perplexity of every token of the test set; rank over {contexts} of its contexts and {vocab_size} tokens.\n"
    )
    write_text(out / "table.md", text)
    write_csv(out / "table.csv", COLUMNS, (dict(zip(COLUMNS, cells)) for cells in rows))
    print(text, end="")


if __name__ == "__main__":
    start.run(main)
