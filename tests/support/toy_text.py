"""A small text and language models trained on it through fairseq; a file that imports the fixtures has them."""

import pytest
import torch
from conftest import USER_DIR, run

VALID_TOKENS = 50 * 9  # lines of 8 words and </s>
NO_DROPOUT = "--dropout 0 --input-dropout 0 --hidden-dropout 0 --embedding-dropout 0 --weight-dropout 0".split()


def write_text(path, lines, seed):
    """Lines of 8 of 20 words, each likely to be followed by the next in the list."""
    generator = torch.Generator().manual_seed(seed)
    with open(path, "w") as file:
        for _ in range(lines):
            word = int(torch.randint(20, (), generator=generator))
            words = []
            for _ in range(8):
                words.append(f"w{word}")
                word = (word + 1 + int(torch.rand((), generator=generator) < 0.3)) % 20
            file.write(" ".join(words) + "\n")


@pytest.fixture(name="text", scope="module")
def toy_text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for seed, (split, lines) in enumerate({"train": 200, "valid": 50, "test": 30}.items()):
        write_text(folder / split, lines, seed)
    (folder / "blank").write_text("\nw1 w2\n\n")
    (folder / "short").write_text("w1 w2\n")
    (folder / "foreign").write_text("w1 xyzzy w2\nplugh\n")
    prefixes = [f"--trainpref={folder}/train", f"--validpref={folder}/valid"]
    tests = ",".join(str(folder / name) for name in ("test", "blank", "short", "foreign"))
    run("preprocess", "--only-source", *prefixes, f"--testpref={tests}", "--destdir", folder / "bin")
    return folder / "bin"


def lm_args(data, save_dir, *more):
    """A small training: 4 columns, epochs of 450 steps in segments of about 35."""
    folders = [data, "--save-dir", save_dir, "--user-dir", USER_DIR, "--task", "bptt_language_modeling"]
    model = "--arch awd_lstm_lm --embed-dim 8 --hidden-sizes 12,10 --gate-dim 5 --gate-noise 0 --frequent-ratio 0.5"
    training = "--criterion awd_lstm_cross_entropy --optimizer nt_asgd --lr 5 --clip-norm 0.25 --weight-decay 1e-5"
    batches = "--batch-size 4 --batch-size-valid 3 --tokens-per-sample 35"
    logs = "--log-format json --log-interval 1 --cpu --num-workers 0"
    return [*folders, *f"{model} {training} {batches} {logs}".split(), *more]


def evaluate(data, path, *more):
    """Perplexity and number of tokens that fairseq-eval-lm prints."""
    args = [data, "--user-dir", USER_DIR, "--task", "bptt_language_modeling", "--path", path, "--cpu"]
    lines = run("eval_lm", *args, "--num-workers", 0, *more).stdout.splitlines()
    (result,) = (line for line in lines if "Perplexity: " in line)
    (counted,) = (line for line in lines if "Evaluated " in line)
    loss = float(result.split("Loss (base 2): ")[1].split(",")[0])
    return loss, int(counted.split("Evaluated ")[1].split()[0].replace(",", ""))


@pytest.fixture(name="trained", scope="module")
def trained_on_toy_text(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    more = "--optimizer adam --lr 0.05 --max-epoch 6 --no-epoch-checkpoints".split()
    log = run("train", *lm_args(text, folder, *NO_DROPOUT, *more)).log
    assert float(log["valid"][-1]["valid_ppl"]) < 15, "20 words, of which it has to learn something"
    return folder / "checkpoint_last.pt", log


def open_lines(lines):
    class Lines(list):
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    return Lines(line + "\n" for line in lines)
