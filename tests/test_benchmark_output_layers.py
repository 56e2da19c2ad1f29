"""scripts/benchmark_output_layers.py: its formulas against counts by hand and by torch, a run, what it skips."""

import csv
import importlib.util
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mixtape_plugin.analysis import benchmark as library
from mixtape_plugin.analysis.benchmark import LAYERS, SHAPES, Setting, Shape, Step, benchmark, multiply_adds

SCRIPT = Path(__file__).parent.parent / "scripts" / "benchmark_output_layers.py"
spec = importlib.util.spec_from_file_location("benchmark_output_layers", SCRIPT)
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)

TINY = Shape("50:6:10:3:0.2:20", 50, 6, 10, 3, 0.2, 20)


@pytest.fixture(autouse=True)
def same_number_of_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_multiply_adds_of_penn_treebank_by_hand():
    ptb = SHAPES["ptb"]
    assert multiply_adds("softmax", ptb) == 2_800_000  # 10000·280
    assert multiply_adds("softmax", ptb, projected=True) == 2_800_000 + 173_600  # 280·620
    assert multiply_adds("moc", ptb) == 2_800_000 + 2_604_000  # 15·280·620
    assert multiply_adds("mos", ptb) == 42_000_000 + 2_604_000
    # 1000 frequent tokens: 3·1000·280, 4·280·620, 3·64·1000 + 3·64·620
    assert multiply_adds("mixtape", ptb) == 2_800_000 + 840_000 + 694_400 + 311_040
    assert multiply_adds("mixtape-no-sharing", ptb) == 2_800_000 + 8_400_000 + 694_400 + 2_039_040


@pytest.mark.parametrize("layer", LAYERS)
def test_multiply_adds_are_what_torch_counts(layer):
    flop_counter = pytest.importorskip("torch.utils.flop_counter")  # torch 2.1 and up
    step = Step(layer, TINY, Setting())
    with flop_counter.FlopCounterMode(display=False) as counter:
        step()
    left_out = {"moc": 3 * 10, "mos": 3 * 10, "mixtape": 3 * 10, "mixtape-no-sharing": 3 * 10}  # priors, shared gates
    assert counter.get_total_flops() == 6 * 20 * (multiply_adds(layer, TINY) + left_out.get(layer, 0))


@pytest.mark.parametrize("layer", LAYERS)
def test_parameters_are_those_of_the_layer(layer):
    counted = sum(parameter.numel() for parameter in library.build_layer(layer, TINY).parameters())
    assert library.count_parameters(layer, TINY) == counted


def test_ratios_of_the_paper():
    # the paper's own words: 11.5x faster than MoS on Penn Treebank, 3.5x and 3.2x faster for gate sharing
    ratio = library.paper_ratio
    assert ratio("mos", SHAPES["ptb"]) / ratio("mixtape", SHAPES["ptb"]) == pytest.approx(11.5, abs=0.05)
    for name, sharing in (("ptb", 3.5), ("one-billion", 3.2)):
        shape = SHAPES[name]
        assert ratio("mixtape-no-sharing", shape) / ratio("mixtape", shape) == pytest.approx(sharing, abs=0.05)
    assert ratio("mixtape", SHAPES["ptb"]) == 27 / 14
    assert ratio("moc", SHAPES["ptb"]) is None and ratio("mixtape", TINY) is None


@pytest.mark.parametrize("layer", LAYERS)
def test_step_reaches_every_parameter_and_drops_the_gradients(layer):
    step = Step(layer, TINY, Setting())
    reached = {}
    for name, parameter in step.layer.named_parameters():
        parameter.register_hook(lambda grad, name=name: reached.update({name: grad.abs().sum() > 0}))
    assert step() > 0
    assert reached.keys() == dict(step.layer.named_parameters()).keys() and all(reached.values())
    assert all(parameter.grad is None for parameter in step.layer.parameters())


@pytest.mark.parametrize("name", SHAPES)
def test_noise_is_off_unless_asked_for(name):
    shape = SHAPES[name]._replace(vocab_size=30, embed_dim=4, feature_dim=4)
    for noise in (False, True):
        step = Step("mixtape", shape._replace(tokens=5), Setting(dtype="float64", noise=noise))
        assert torch.equal(step.layer(step.features), step.layer(step.features)) is not noise


def test_layers_take_turns_and_medians_leave_the_warm_up_out(monkeypatch):
    seconds = {"softmax": [100, 1, 2, 6], "mixtape": [200, 3, 5, 7]}
    order = []

    class FakeStep:
        def __init__(self, layer, shape, setting, tied_weight):
            self.layer = layer

        def __call__(self):
            order.append(self.layer)
            return seconds[self.layer].pop(0)

    monkeypatch.setattr(library, "Step", FakeStep)
    monkeypatch.setattr(library, "peak_memory_of_fresh_process", lambda *args: 5_000_000)
    softmax, mixtape = benchmark(TINY, ["softmax", "mixtape"], Setting(), rounds=3)
    assert order == ["softmax", "mixtape"] * 4
    assert (softmax["ms_median"], softmax["ms_min"], softmax["ms_max"]) == (2000, 1000, 6000)
    assert (mixtape["ms_median"], mixtape["ms_min"], mixtape["ms_max"]) == (5000, 3000, 7000)
    assert (softmax["time_ratio"], mixtape["time_ratio"]) == (1, 2.5)
    assert mixtape["peak_memory_mb"] == 5


def test_what_is_too_large_is_skipped_and_not_run(monkeypatch):
    def run(layer, shape, setting):
        if layer == "moc":
            raise MemoryError
        return 0

    monkeypatch.setattr(library, "peak_memory_of_fresh_process", run)
    done = []
    limit = library.estimate_memory("mos", TINY, Setting()) - 1
    softmax, moc, mos = benchmark(TINY, ["softmax", "moc", "mos"], Setting(), 2, limit, done.append)
    assert softmax["skipped"] is None and softmax["ms_median"] > 0
    assert moc["skipped"].startswith("did not fit in") and moc["ms_median"] is moc["time_ratio"] is None
    assert mos["skipped"].startswith("does not fit in") and mos["peak_memory_mb"] is None
    assert mos["flop_ratio"] > 3 and mos["parameters"] > 0
    assert sum(done) == 3 * (2 + 2)

    rows = benchmark(TINY, ["softmax", "mos"], Setting(), 2, memory_limit=0)
    assert [row["time_ratio"] for row in rows] == [None, None]


@pytest.mark.slow
def test_run_from_the_command_line(tmp_path):
    # 2000·512 floats are 41 MB: beyond what malloc keeps for reuse, so that the peaks can be told
    text, values = "20000:8:12:3:0.1:512", 20000 * 512 * 4 / 1e6
    shape = script.parse_shape(text)
    limit = library.estimate_memory("mixtape-no-sharing", shape, Setting()) / 1e9 - 0.001
    out = tmp_path / "run.csv"
    command = [sys.executable, str(SCRIPT), "--shapes", text, "--rounds", "2", "--threads", "1", "--noise"]
    command += ["--memory-limit", str(limit), "--out", str(out)]
    process = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)
    assert process.returncode == 0, process.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["run.csv"]

    with open(out, newline="") as file:
        rows = list(csv.DictReader(file))
    facts = ["machine", "cores", "threads", "load_before", "dtype", "noise", "rounds"]
    assert list(rows[0]) == [*library.COLUMNS, *facts, "python", "torch", "plugin", "commit", "date"]
    assert [row["layer"] for row in rows] == list(LAYERS)
    assert [row["num_components"] for row in rows] == ["1", "3", "3", "4", "4"]
    for row in rows[:-1]:
        low, median, high = (float(row[name]) for name in ("ms_min", "ms_median", "ms_max"))
        assert 0 < low <= median <= high < math.inf
        assert float(row["time_ratio"]) == pytest.approx(median / float(rows[0]["ms_median"]))
        # log-probabilities and their gradient at least, K times over for MoS
        least = 2 * values * (3 if row["layer"] == "mos" else 1)
        most = library.estimate_memory(row["layer"], shape, Setting()) / 1e6
        assert least <= float(row["peak_memory_mb"]) <= most, row["layer"]
    assert rows[-1]["skipped"].startswith("does not fit in") and rows[-1]["ms_median"] == ""
    for row in rows:
        assert row["torch"] == torch.__version__ and row["threads"] == "1" and row["noise"] == "True"
        assert row["machine"] and row["commit"] and row["date"]

    table = [line for line in process.stdout.splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(LAYERS)
    assert {line.count("|") for line in table} == {10}
    assert f"machine {rows[0]['machine']}, " in process.stdout.splitlines()[0]


def test_csv_appears_whole_or_not_at_all(tmp_path):
    out = tmp_path / "run.csv"
    with pytest.raises(ValueError):
        script.write_rows(str(out), [dict.fromkeys(library.COLUMNS), {"no such column": 1}], {})
    assert not out.exists()


@pytest.mark.parametrize(
    "options",
    [
        ["--shapes", "wmt"],
        ["--shapes", "1000:16:24:3:0.1"],
        ["--shapes", "1000:0:24:3:0.1:64"],
        ["--shapes", "1000:16:24:0:0.1:64"],
        ["--shapes", "1000:16:24:3:1.5:64"],
        ["--shapes", "1000:16:24:3:0.1:16"],
        ["--rounds", "0"],
        ["--threads", "0"],
        ["--tokens", "16"],
        ["--memory-limit", "nan"],
        ["--out", "no/such/folder/run.csv"],
        pytest.param(["--device", "cuda"], marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")),
        ["--dtype", "float16"],
    ],
    ids=" ".join,
)
def test_mistakes_get_one_sentence(options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        script.main(options)
    sentence = str(stop.value)
    assert " ".join(options) in sentence and "\n" not in sentence
    assert list(tmp_path.iterdir()) == []


def test_softmax_is_always_there():
    assert script.parse(["--layers", "mixtape", "moc"]).layers == ["softmax", "moc", "mixtape"]


@pytest.mark.gpu
def test_run_on_a_gpu():
    shape = Shape("gpu", 20000, 64, 96, 3, 0.1, 512)
    rows = benchmark(shape, LAYERS, Setting("cuda", "bfloat16"), rounds=2)
    for row in rows:
        assert row["skipped"] is None and row["ms_median"] > 0
        assert row["peak_memory_mb"] >= 512 * 20000 * 4 / 1e6  # log-probabilities in float32
