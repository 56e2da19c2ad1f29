"""Small AWD-LSTM language models and texts for the tests of what is done with a trained one."""

import csv
import random
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import reference
import reference_lm
import torch
from conftest import USER_DIR, make_dictionary, run

from mixtape_plugin.data.bptt_dataset import TokenStream
from mixtape_plugin.models.awd_lstm_lm import AWDLSTMLanguageModel
from mixtape_plugin.output_layers import OUTPUT_LAYERS, OutputLayerConfig

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
V, EOS, PAD = 14, 2, 1


# ------------------------------------------------------------------------------------------------ without a task


class ToyTask:
    """Splits that are given as lists of tokens."""

    def __init__(self, **splits):
        self.datasets = {name: TokenStream(torch.tensor(tokens), EOS, PAD, name) for name, tokens in splits.items()}

    def dataset(self, split):
        return self.datasets[split]


def random_text(length, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(2, V) for _ in range(length)]


def repetitive_text(length, seed=0):
    """A few words again and again, after some time others, each with a fixed successor as long."""
    rng, tokens = random.Random(seed), []
    while len(tokens) < length:
        tokens += rng.sample(range(3, V), 4) * 15
    return tokens[:length]


def options_of(output_layer):
    """Those that the formulas of the layers depend on."""
    return {"output_layer": output_layer, "num_components": 3, "plif_pieces": 9, "plif_range": 3.0}


def build(output_layer="softmax", std=0.6, dtype=torch.float64, dropout=0.5, masked_tokens=(), **options):
    """Two LSTM layers with random parameters that are large enough to matter, all dropouts on."""
    dictionary = make_dictionary(V - 4)
    task = SimpleNamespace(target_dictionary=dictionary, source_dictionary=dictionary, masked_tokens=masked_tokens)
    names = ("dropout", "input_dropout", "hidden_dropout", "embedding_dropout", "weight_dropout", "context_dropout")
    hidden_sizes = "7,6" if OUTPUT_LAYERS[output_layer].has_projection else "7,5"
    options = {**options_of(output_layer), **options}
    args = Namespace(embed_dim=5, hidden_sizes=hidden_sizes, gate_dim=3, gate_noise=0.5, **options)
    model = AWDLSTMLanguageModel.build_model(Namespace(**vars(args), **dict.fromkeys(names, dropout)), task)
    torch.manual_seed(1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=std)
    return model.to(dtype)


def predict_by_hand(parameters, output_layer, inputs, states):
    """log P [B·T, V], the last layer's output and the new states, from a model's parameters by name alone."""
    by_module = {}
    for name, parameter in parameters.items():
        module, name = name.rsplit(".", 1) if "output_projection" not in name else name.split("output_projection.")
        by_module.setdefault(module, {})[name] = parameter
    embedding = by_module["decoder.embed_tokens"]["weight"]
    features, _, states = reference_lm.awd_lstm(
        embedding, [by_module["decoder.layers.0"], by_module["decoder.layers.1"]], inputs, states
    )
    tied = {**by_module["decoder."], "weight": embedding}
    config = OutputLayerConfig(**options_of(output_layer))
    log_probs = reference.log_probs_of(config, tied, features.flatten(0, 1))
    return log_probs, features, states


# ------------------------------------------------------------------------------------------------- through fairseq


def train(folder, *options):
    """Binarized repetitive text and a checkpoint trained on it for some epochs: its data folder and path."""
    # A line is 9 words and its end: 2,000 tokens to train on, 200 to validate, 300 to test.
    for split, (lines, seed) in {"train": (200, 1), "valid": (20, 2), "test": (30, 3)}.items():
        words = [f"w{token}" for token in repetitive_text(9 * lines, seed)]
        text = "".join(" ".join(words[n : n + 9]) + "\n" for n in range(0, len(words), 9))
        (folder / split).write_text(text)
    data, checkpoints = folder / "bin", folder / "checkpoints"
    prefixes = [f"--{name}pref={folder}/{name}" for name in ("train", "valid", "test")]
    run("preprocess", "--only-source", "--padding-factor", 1, "--destdir", data, *prefixes)
    model = "--arch awd_lstm_lm --embed-dim 8 --hidden-sizes 12,8 --num-components 2 --gate-dim 4 --context-dropout 0.1"
    model += " --frequent-ratio 0.5"
    training = "--task bptt_language_modeling --tokens-per-sample 20 --batch-size 10 --batch-size-valid 5 --max-epoch 6"
    step = "--criterion awd_lstm_cross_entropy --optimizer adam --lr 2e-2 --clip-norm 0.25"
    logs = "--no-epoch-checkpoints --disable-validation --cpu --num-workers 0 --no-progress-bar"
    folders = [data, "--save-dir", checkpoints, "--user-dir", USER_DIR]
    run("train", *folders, *f"{model} {training} {step} {logs}".split(), *options)
    return SimpleNamespace(data=str(data), path=str(checkpoints / "checkpoint_last.pt"))


def read_csv(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
