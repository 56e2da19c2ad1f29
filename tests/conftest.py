"""A toy parallel corpus, binarized once, and ways to run fairseq's commands and to build small models."""

import contextlib
import functools
import io
import json
import logging
import os
import random
import subprocess
import sys
import sysconfig
from argparse import Namespace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.data import Dictionary
from fairseq.trainer import Trainer
from training_logs import write_folder

import mixtape_plugin
from mixtape_plugin import errors
from mixtape_plugin.fairseq_compat import checkpoints
from mixtape_plugin.models import transformer
from mixtape_plugin.output_layers import OUTPUT_LAYERS

USER_DIR = os.path.dirname(mixtape_plugin.__file__)
QUICK = Path(__file__).with_name("support") / "quick"
LAYERS = tuple(OUTPUT_LAYERS)
# The files that take longest, a minute or more: processes that share the files (scripts/test.sh) begin with them.
LONGEST = (
    "test_prepare_translation",
    "test_quickstart",
    "test_bptt_resume",
    "test_bptt_training",
    "test_damaged_inputs",
    "test_multi30k_example",
    "test_switchboard_example",
    "test_benchmark_output_layers",
    "test_training",
    "test_generation",
    "test_lm_examples",
    "test_multi30k_data",
)
SENTENCES = {"train": 480, "valid": 40, "test": 100, "five": 5}  # "five" is binarized as test1


# ------------------------------------------------------------------------- the order of files, and which are quick


def pytest_configure(config):
    """--no-loadscope-reorder, which an older pytest-xdist does not have: files in the order below."""
    config.option.loadscopereorder = False


def trains(*fixtures):
    """A fixture that trains through fairseq is called trained…, which makes the tests that ask for it slow."""
    return any(name.startswith("trained") for name in fixtures)


def pytest_collection_modifyitems(items):
    for item in items:
        if trains(*item.fixturenames):
            item.add_marker("slow")
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU here"))
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: (*LONGEST, item.path.stem).index(item.path.stem))


@contextlib.contextmanager
def no_training(reason):
    """In it a training through fairseq fails, in a process started from here too."""

    def fail(*args, **kwargs):
        pytest.fail(reason)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "train_step", fail)
        patch.setenv("PYTHONPATH", str(QUICK), prepend=os.pathsep)
        yield


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    slow = item.get_closest_marker("slow")
    with contextlib.nullcontext() if slow else no_training(f"{item.nodeid} trains: mark it slow"):
        yield


@pytest.hookimpl(hookwrapper=True)
def pytest_fixture_setup(fixturedef):
    """A fixture of several tests: the slow ones among them would train for the others, in a run of all."""
    name = fixturedef.argname
    allowed = fixturedef.scope == "function" or trains(name, *fixturedef.argnames)
    with contextlib.nullcontext() if allowed else no_training(f"the fixture {name} trains: call it trained_{name}"):
        yield


# -------------------------------------------------------------------------------------- commands of fairseq


@pytest.fixture
def enabled_loss_scale(monkeypatch):
    """--amp scales its loss, as it does on a GPU; on a CPU fairseq's scaler is disabled."""
    monkeypatch.setattr(torch.cuda.amp, "GradScaler", lambda **options: torch.amp.GradScaler("cpu", **options))


@pytest.fixture(autouse=not checkpoints.loads_weights_only())
def trust_checkpoints(monkeypatch):
    """With older torch, the tests about other matters load their own checkpoints."""
    monkeypatch.setenv(checkpoints.TRUST_CHECKPOINTS, "1")


def parse_log(output):
    """Name of a log (train_inner, train, valid) -> its lines as dicts, out of the output with --log-format json."""
    parsed = {}
    for line in output.splitlines():
        fields = line.split(" | ", 3)
        if len(fields) == 4 and fields[3].startswith('{"'):
            parsed.setdefault(fields[2], []).append(json.loads(fields[3]))
    return parsed


def run(command, *args):
    """A fairseq command in this process, which saves the seconds of an import: its output and its parsed log."""
    cli_main = import_module(f"fairseq_cli.{command}").cli_main
    vars(checkpoint_utils.save_checkpoint).pop("best", None)  # of another training, which fairseq keeps here
    output = io.StringIO()
    handler = logging.StreamHandler(output)
    handler.setFormatter(logging.Formatter("%(asctime)s | %(levelname)s | %(name)s | %(message)s"))
    root = logging.getLogger()
    level = root.level
    with mock.patch.object(sys, "argv", [f"fairseq-{command}", *map(str, args)]):
        with mock.patch.object(root, "handlers", [handler]), contextlib.redirect_stdout(output):
            root.setLevel(logging.INFO)
            try:
                cli_main()
            finally:
                root.setLevel(level)
    return SimpleNamespace(stdout=output.getvalue(), log=parse_log(output.getvalue()))


def start(*command):
    """A command in a process of its own, with as many threads as this one."""
    env = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    env.pop(errors.FULL_TRACEBACK, None)
    return subprocess.Popen(
        list(map(str, command)), env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8"
    )


def console_script(command):
    """The command that a user types."""
    return Path(sysconfig.get_path("scripts")) / f"fairseq-{command}"


def train_args(data, save_dir, *more):
    """A small training on the toy corpus: 1+1 layers of width 16; of two equal options the later one wins."""
    size = "--{0}-layers 1 --{0}-embed-dim 16 --{0}-ffn-embed-dim 32 --{0}-attention-heads 2"
    model = f"--arch mixtape_transformer --gate-dim 8 {size.format('encoder')} {size.format('decoder')}"
    training = "--criterion output_layer_cross_entropy --optimizer adam --lr 1e-2 --max-tokens 512 --max-update 4"
    logs = "--log-format json --log-interval 1 --no-epoch-checkpoints --cpu --num-workers 0"
    folders = [data, "--save-dir", save_dir, "--user-dir", USER_DIR]
    return [*folders, *model.split(), *training.split(), *logs.split(), *more]


def generate_args(data, path, *more):
    folders = [data, "--path", path, "--user-dir", USER_DIR]
    return [*folders, *"--cpu --num-workers 0 --beam 2 --max-len-b 12 --max-tokens 1024".split(), *more]


def hypotheses(stdout):
    """Sentence number -> its best translation, out of what fairseq-generate and fairseq-interactive print."""
    lines = [line.split("\t") for line in stdout.splitlines() if line.startswith("H-")]
    found = {int(line[0][2:]): line[2] for line in lines}
    assert len(found) == len(lines), "a sentence was translated twice"
    return found


def load_parameters(path):
    return torch.load(path, weights_only=True)["model"]


# ------------------------------------------------------------------------------------------------ the corpus


def write_corpus(folder, seed=0):
    """Sentences of 2 to 7 of 30 words in alphabetical order, the lower ones likelier; word for word another language.

    So easy that a small model learns it in a minute of a test's time: the next word is mostly the next in the alphabet.
    """
    rng = random.Random(seed)
    weights = [1 / (n + 2) for n in range(30)]
    for split, size in SENTENCES.items():
        starts = rng.choices(range(30), weights, k=size)
        sentences = [[(first + n) % 30 for n in range(rng.randint(2, 7))] for first in starts]
        for language in "xy":
            text = "".join(" ".join(f"{language}{n}" for n in sentence) + "\n" for sentence in sentences)
            (folder / f"{split}.{language}").write_text(text)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Folder of the text: {train,valid,test,five}.{x,y}."""
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder)
    return folder


@pytest.fixture(scope="session")
def data(corpus):
    """The corpus as fairseq-preprocess writes it, `five` as test1."""
    prefixes = f"--trainpref={corpus}/train --validpref={corpus}/valid --testpref={corpus}/test,{corpus}/five"
    run("preprocess", "-s", "x", "-t", "y", "--destdir", corpus / "bin", *prefixes.split())
    return corpus / "bin"


@pytest.fixture
def folder(tmp_path):
    """A function that writes files into a new folder."""
    return lambda name="run", **files: write_folder(tmp_path / name, **files)


@pytest.fixture(scope="session")
def text(corpus):
    """One side of the corpus as the text of a language model."""
    prefixes = [f"--{split}pref={corpus}/{split}.x" for split in ("train", "valid", "test")]
    run("preprocess", "--only-source", "--padding-factor", 1, "--destdir", corpus / "text", *prefixes)
    return corpus / "text"


@pytest.fixture(scope="session")
def trained(data, tmp_path_factory):
    """A function from an output layer's name to its training, made when first asked for.

    Gives the checkpoint of the end and one halfway, and the log.
    """

    @functools.lru_cache(maxsize=None)
    def train(output_layer):
        folder = tmp_path_factory.mktemp(output_layer)
        more = (
            f"--output-layer {output_layer} --max-update 80 --lr 2e-2 --label-smoothing 0.1 --report-accuracy".split()
        )
        more += "--save-interval 100 --validate-interval 100 --save-interval-updates 40".split()
        if output_layer in ("softmax", "mixtape"):
            more += ["--share-decoder-input-output-embed"]
        log = run("train", *train_args(data, folder, *more)).log
        (halfway,) = folder.glob("checkpoint_*_40.pt")
        return SimpleNamespace(checkpoint=folder / "checkpoint_last.pt", halfway=halfway, log=log)

    return train


# --------------------------------------------------------------------------------------------- models alone


def make_dictionary(num_words=30):
    """A dictionary ordered by frequency, all counts different."""
    dictionary = Dictionary()
    for n in range(num_words):
        dictionary.add_symbol(f"w{n}", n=num_words - n)
    return dictionary


def complete_args(arch="mixtape_transformer", **args):
    """The options of an architecture as fairseq-train hands them to the model, out of those given."""
    args = Namespace(**args)
    getattr(transformer, arch)(args)
    return args


def build_model(arch="mixtape_transformer", dictionary=None, **args):
    """A Transformer over one dictionary for both languages, without a task."""
    dictionary = dictionary or make_dictionary()
    task = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
    return transformer.MixtapeTransformerModel.build_model(complete_args(arch, **args), task)


def build_small_model(seed=1, **args):
    """The same in float64 with 2+2 layers of width 16, weights large enough for sharp distributions, no dropout."""
    torch.manual_seed(seed)
    size = {f"{side}_{name}": 16 for side in ("encoder", "decoder") for name in ("embed_dim", "ffn_embed_dim")}
    size.update(encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2, gate_dim=8)
    model = build_model(**{**size, **args}).double().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(3)
    return model


def left_padded(sentences, pad):
    """[batch, length] of source sentences, as fairseq pads them."""
    length = max(map(len, sentences))
    return torch.tensor([[pad] * (length - len(sentence)) + sentence for sentence in sentences])


def right_padded(sentences, pad):
    """[batch, length] of target sentences, as fairseq pads them."""
    length = max(map(len, sentences))
    return torch.tensor([sentence + [pad] * (length - len(sentence)) for sentence in sentences])
