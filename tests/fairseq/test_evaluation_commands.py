"""scripts/cache_pointer.py and scripts/dynamic_evaluation.py, on a language model trained through fairseq."""

import math
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
from conftest import USER_DIR, run
from recipes import load_script
from toy_language_models import SCRIPTS, read_csv, train

from mixtape_plugin.errors import UserError
from mixtape_plugin.evaluation import cache_pointer, dynamic_evaluation
from mixtape_plugin.evaluation.language_model import load_language_model, perplexity


def with_cache(model, task, split, **settings):
    return cache_pointer.cache_pointer(cache_pointer.predict_text(model, task, split), **settings)


def dynamic(model, task, split, **settings):
    statistics = dynamic_evaluation.gradient_statistics(model, task)
    return dynamic_evaluation.dynamic_evaluation(model, task, split, statistics, **settings)


COMMANDS = {
    "cache_pointer": SimpleNamespace(
        score=with_cache,
        settings="(lambda {weight:g}, theta {theta:g}, window {window:g})",
        defaults=cache_pointer.PAPER_SETTINGS["ptb"],
        columns=["weight", "theta", "window"],
        grid=[(weight, theta, window) for weight in (0, 0.2, 0.4) for theta in (0.5, 2) for window in (10, 100)],
        options="--weights 0 0.2 0.4 --thetas 0.5 2 --windows 10 100 --dataset wikitext2",
        given={},
        valid={},
        tokens=200,
        mistakes=[
            ("--lambda 1", "--weight 1.0 is not allowed: from 0 to less than 1"),
            ("--theta -1", "--theta -1.0 is not allowed: 0 to 1,000,000"),
            ("--theta 1e308", "--theta 1e+308 is not allowed: 0 to 1,000,000, and finite in float32"),
            ("--window 0", "--window 0 is not allowed: 1 to 1,000,000,000"),
            (f"--window {10**20}", f"--window {10**20} is not allowed: 1 to 1,000,000,000"),
            ("--search --weights 0.1 1", "is not allowed: from 0 to less than 1, each"),
            ("--search --windows 5 0", "is not allowed: 1 to 1,000,000,000, each"),
            ("--windows 5 7", "--windows 5 7 needs --search"),
            ("--out folder", "--out folder needs --search"),
            ("--search --theta 2", "--theta 2.0 does not go with --search, which chooses it: give --thetas"),
            ("--search --weight 0", "--weight 0.0 does not go with --search, which chooses it: give --weights"),
        ],
    ),
    "dynamic_evaluation": SimpleNamespace(
        score=dynamic,
        settings="(learning rate {learning_rate:g}, decay {decay:g}, epsilon {epsilon:g}, segments of 5)",
        defaults=dynamic_evaluation.PAPER_SETTINGS["ptb"],
        columns=["learning rate", "decay"],
        grid=[(learning_rate, decay) for learning_rate in (0, 0.004) for decay in (0.01, 0.1)],
        options="--learning-rates 0 0.004 --decays 0.01 0.1 --epsilon 0.002 --search-tokens 100",
        given={"epsilon": 0.002},
        valid={"max_tokens": 100},
        tokens=100,
        mistakes=[
            ("--learning-rate -1", "--learning-rate -1.0 is not allowed: 0 or more"),
            ("--decay -1", "--decay -1.0 is not allowed: 0 or more"),
            ("--epsilon 0", "--epsilon 0.0 is not allowed: more than 0"),
            ("--search --decays 1 -1", "is not allowed: 0 or more, each"),
            ("--decays 1", "--decays 1.0 needs --search"),
            ("--search-tokens 5", "--search-tokens 5 needs --search"),
            (
                "--search --decay 1 --decays 1 2",
                "--decay 1.0 does not go with --search, which chooses it",
            ),
            ("data:more --epsilon 1", "is not allowed: one folder, since the gradients are of the whole training text"),
        ],
    ),
}
each_command = pytest.mark.parametrize("name", COMMANDS)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train(tmp_path_factory.mktemp("trained"), "--output-layer", "mixtape")


@pytest.fixture(scope="module")
def loaded(trained):
    """The model and the task; evaluation leaves both as they are."""
    return load_language_model(trained.path, trained.data)


def perplexities(output):
    """[(tokens, perplexity)], the static one first, out of what a command prints."""
    lines = re.findall(
        r"^test: (\S+) tokens, (?:static |dynamic )?perplexity (?:with cache )?(\S+)", output, re.MULTILINE
    )
    return [(int(tokens.replace(",", "")), float(value)) for tokens, value in lines]


def near(*scores):
    """What is printed of them: three digits."""
    return [(300, pytest.approx(score.perplexity, abs=6e-4)) for score in scores]


@each_command
def test_command_lowers_perplexity_and_leaves_the_checkpoint_alone(name, trained, loaded):
    expected = COMMANDS[name]
    with open(trained.path, "rb") as file:
        before = file.read()
    command = [sys.executable, SCRIPTS / f"{name}.py", trained.data, "--path", trained.path, "--cpu"]
    result = subprocess.run(list(map(str, command)), capture_output=True, encoding="utf-8")
    assert result.returncode == 0, result.stderr
    assert "INFO" not in result.stderr and "DEBUG" not in result.stderr and "Warning" not in result.stderr
    assert expected.settings.format(**expected.defaults) in result.stdout
    statistics = "gradient statistics: 2,000 of 2,000 training tokens, 4 batches of 100 x 5"
    assert (statistics in result.stdout) == (name == "dynamic_evaluation")
    with open(trained.path, "rb") as file:
        assert file.read() == before

    found = perplexities(result.stdout)
    assert found == near(perplexity(*loaded, "test"), expected.score(*loaded, "test", **expected.defaults))
    assert found[1][1] < found[0][1]


@each_command
def test_command_searches_on_the_validation_text(name, trained, loaded, tmp_path, capsys):
    expected, out = COMMANDS[name], tmp_path / "out"
    options = ["--search", *expected.options.split(), "--out", str(out)]
    load_script(name).main([trained.data, "--path", trained.path, "--cpu", *options])
    output = capsys.readouterr().out
    rows = read_csv(out / "search.csv")
    tried = [tuple(float(row[column]) for column in expected.columns) for row in rows]
    assert sorted(tried) == expected.grid
    assert {row["tokens"] for row in rows} == {str(expected.tokens)}
    assert {path.name for path in out.iterdir()} == {"search.csv", "search.png"}
    assert (out / "search.png").read_bytes().startswith(b"\x89PNG")

    names = [column.replace(" ", "_") for column in expected.columns]
    tried = [expected.grid[expected.grid.index(values)] for values in tried]  # the window a whole number
    settings = [{**dict(zip(names, values)), **expected.given} for values in tried]
    for row, each in zip(rows, settings):
        score = expected.score(*loaded, "valid", **each, **expected.valid)
        assert float(row["perplexity"]) == pytest.approx(score.perplexity, rel=1e-6)
    _, winner = min(zip(rows, settings), key=lambda pair: float(pair[0]["perplexity"]))
    found = perplexities(output)
    assert found == near(perplexity(*loaded, "test"), expected.score(*loaded, "test", **winner))
    assert winner[names[0]] > 0 and found[1][1] < found[0][1]
    assert expected.settings.format(**winner) in output


def with_options(good, options):
    """The first word instead of the data folder, where it is no option."""
    first, *rest = options.split()
    return [*good, first, *rest] if first.startswith("--") else [first, *good[1:], *rest]


@each_command
def test_search_wants_the_validation_text_before_anything_else(name, trained, tmp_path, capsys):
    data = shutil.copytree(trained.data, tmp_path / "data")
    for file in data.glob("valid*"):
        file.unlink()
    with pytest.raises(FileNotFoundError, match="Dataset not found: valid"):
        load_script(name).main([str(data), "--path", trained.path, "--cpu", "--search", "--out", str(tmp_path / "out")])
    assert capsys.readouterr().out == ""


@each_command
def test_command_refuses_bad_input(name, trained, data, tmp_path):
    script = load_script(name)
    (tmp_path / "file").write_text("no checkpoint")
    good = [trained.data, "--path", trained.path, "--cpu"]
    for options, message in [
        *((with_options(good, options), message) for options, message in COMMANDS[name].mistakes),
        ([*good, "--segment-length", "0"], "--segment-length 0 is not allowed: at least 1"),
        ([*good, "--search", "--out", str(tmp_path / "file")], "file cannot be a folder"),
        ([trained.data, "--path", str(tmp_path / "none.pt")], "none.pt does not exist"),
        (
            [trained.data, "--path", str(tmp_path)],
            f"is a folder: give a checkpoint in it, such as {tmp_path}/checkpoint_b",
        ),
        ([trained.data, "--path", str(tmp_path / "file")], "is no checkpoint"),
        ([str(tmp_path / "nowhere"), "--path", trained.path], "nowhere does not exist"),
        ([str(data), "--path", trained.path], "dict"),
    ]:
        with pytest.raises(UserError, match=re.escape(message)) as error:
            script.main(options)
        assert "\n" not in str(error.value)
    with pytest.raises(FileNotFoundError, match="Dataset not found: nosuch"):  # fairseq's sentence
        script.main([*good, "--subset", "nosuch"])


def test_dynamic_evaluation_that_diverges_is_no_score(trained, capsys):
    """Its parameters run away; what came before is printed, a perplexity over a part of the text is not."""
    script, command = load_script("dynamic_evaluation"), [trained.data, "--path", trained.path, "--cpu"]
    with pytest.raises(UserError, match=r"^dynamic evaluation diverged after \d+ of 300 tokens: lower --learning"):
        script.main([*command, "--learning-rate", "1e30"])
    assert "static perplexity" in (said := capsys.readouterr().out) and "dynamic" not in said


def test_perplexity_is_that_of_fairseq_eval_lm(trained, loaded):
    folders = [trained.data, "--path", trained.path, "--user-dir", USER_DIR]
    options = (
        "--task bptt_language_modeling --gen-subset test --batch-size 4 --tokens-per-sample 20 --cpu --num-workers 0"
    )
    output = run("eval_lm", *folders, *options.split()).stdout
    loss, found = re.search(r"Loss \(base 2\): ([\d.]+), Perplexity: ([\d.]+)", output).groups()
    score = perplexity(*loaded, "test", columns=4)
    assert float(loss) == pytest.approx(score.nll / score.tokens / math.log(2), abs=6e-5)
    assert float(found) == pytest.approx(score.perplexity, abs=6e-3)
    assert "Evaluated 300 tokens" in output
