"""scripts/benchmark_networks.py: the networks it compares, its step against torch's own, a run, what it skips."""

import copy
import csv
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mixtape_plugin.analysis import network_benchmark as library
from mixtape_plugin.analysis.benchmark import Setting
from mixtape_plugin.analysis.network_benchmark import SHAPES, TrainingStep, benchmark, network_args

SCRIPT = Path(__file__).parent.parent / "scripts" / "benchmark_networks.py"
spec = importlib.util.spec_from_file_location("benchmark_networks", SCRIPT)
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)

LAYERS = ("softmax", "moc-2", "mos-3", "mixtape", "mixtape-no-sharing")
TINY = SHAPES["ptb"]._replace(
    shape="tiny", vocab_size=40, embed_dim=6, hidden_sizes="8,7,5", batch_size=3, segment_length=6, layers=LAYERS
)


@pytest.fixture(autouse=True)
def same_number_of_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "shape, layer, own, same",
    [
        ("ptb", "softmax", (400, "1150,1150,400"), (280, "960,960,280")),
        ("ptb", "mos-15", (280, "960,960,620"), (280, "960,960,620")),
        ("ptb", "moc-15", (280, "960,960,620"), (280, "960,960,620")),
        ("ptb", "mixtape", (280, "1024,1024,620"), (280, "960,960,620")),
        ("wikitext2", "softmax", (400, "1150,1150,400"), (300, "1150,1150,300")),
        ("wikitext2", "mixtape-no-sharing", (300, "1206,1206,650"), (300, "1150,1150,650")),
        ("one-billion", "softmax", (1024, "1024,1024"), (900, "1024,900")),
        ("one-billion", "mos-7", (900, "1024,1024"), (900, "1024,1024")),
    ],
)
def test_sizes_of_the_networks(shape, layer, own, same):
    for sizes, expected in (("own", own), ("same", same)):
        args = network_args(layer, SHAPES[shape], sizes)
        assert (args.embed_dim, args.hidden_sizes) == expected


def test_options_of_the_output_layers():
    def options(layer, shape="ptb"):
        args = network_args(layer, SHAPES[shape])
        return args.output_layer, args.num_components

    assert options("mos-5") == ("mos", 5)
    assert options("moc-3") == ("moc", 3)
    assert options("moc-3", "one-billion") == ("moc", 3)
    assert options("mixtape") == ("mixtape", 4)
    assert network_args("softmax", SHAPES["ptb"]).output_layer == "softmax"
    assert network_args("mixtape", SHAPES["ptb"]).frequent_ratio == 0.1
    assert network_args("mixtape-no-sharing", SHAPES["ptb"]).frequent_ratio == 1
    custom = network_args("softmax", TINY, "own")
    assert (custom.embed_dim, custom.hidden_sizes) == (6, "8,7,6")


def test_figures_of_the_paper():
    # the paper's words: 5% slower on Penn Treebank; out of its tables: MoS-15 2.2 times, and 43% slower with 100K words
    assert library.paper_ratio("mixtape", SHAPES["ptb"]) == pytest.approx(1.05, abs=0.005)
    assert library.paper_ratio("mos-15", SHAPES["ptb"]) == 731 / 328
    assert library.paper_ratio("mixtape", SHAPES["one-billion"]) == pytest.approx(1.43, abs=0.005)
    assert library.paper_output_share("mixtape", SHAPES["ptb"]) == 27 / 345
    assert library.paper_ratio("moc-15", SHAPES["ptb"]) is library.paper_output_share("mixtape", TINY) is None


@pytest.mark.parametrize("layer", LAYERS)
def test_step_is_that_of_sgd_on_the_penalised_loss(layer):
    torch.manual_seed(1)
    step = TrainingStep(layer, TINY, Setting())
    # a fused loss may draw its noise in another order; the network's dropouts stay
    for name in ("context_dropout", "gate_dropout", "gate_noise"):
        setattr(step.model.decoder.output_projection.config, name, 0.0)
    expected = copy.deepcopy(step.model)
    assert expected.training and [layer.weight_dropout for layer in expected.decoder.layers] == [0.5] * 3
    before = [parameter.clone() for parameter in step.model.parameters()]
    torch.manual_seed(2)
    assert step() > 0

    torch.manual_seed(2)
    inputs, target = step.sample["net_input"]["src_tokens"], step.sample["target"]
    assert inputs.shape == target.shape == (3, 6)
    assert not set(target.flatten().tolist()) & set(step.model.decoder.output_projection.masked_tokens)
    features, extra = expected(inputs, features_only=True)
    log_probs = expected.decoder.output_projection(features).log_softmax(-1)
    loss = torch.nn.functional.nll_loss(log_probs.flatten(0, 1), target.flatten()) + 2 * (features**2).mean()
    loss = loss + (extra["last_hidden"][:, 1:] - extra["last_hidden"][:, :-1]).pow(2).mean()
    loss.backward()
    assert torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.25) > 0.25
    torch.optim.SGD(expected.parameters(), lr=1.0, weight_decay=1.2e-6).step()
    for old, new, wanted in zip(before, step.model.parameters(), expected.parameters()):
        assert not torch.equal(old, wanted) and new.grad is None
        torch.testing.assert_close(new, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("layer", LAYERS)
def test_output_layer_is_timed_with_its_gradients_and_without_traces(layer):
    step = TrainingStep(layer, TINY, Setting())
    before = [parameter.clone() for parameter in step.model.parameters()]
    reached = set()
    for name, parameter in step.model.decoder.output_projection.named_parameters():
        parameter.register_hook(lambda grad, name=name: reached.add(name))
    assert step.output_layer() > 0
    assert reached == {name for name, _ in step.model.decoder.output_projection.named_parameters()}
    for old, new in zip(before, step.model.parameters()):
        assert torch.equal(old, new) and new.grad is None


def test_networks_take_turns(monkeypatch):
    order = []
    seconds = {"softmax": [9, 1, 2, 6], "mixtape": [9, 7, 3, 5]}  # the first is the warm-up's
    output_seconds = {"softmax": [9, 1, 1, 1], "mixtape": [0, 2, 4, 1]}

    class FakeStep(TrainingStep):
        def __init__(self, layer, shape, setting, sizes):
            super().__init__(layer, shape, setting, sizes)
            self.layer = layer

        def __call__(self):
            order.append(self.layer)
            return seconds[self.layer].pop(0)

        def output_layer(self):
            order.append(f"{self.layer}'s output")
            return output_seconds[self.layer].pop(0)

    monkeypatch.setattr(library, "TrainingStep", FakeStep)
    monkeypatch.setattr(library, "in_fresh_process", lambda *args: 5_000_000)
    done = []
    softmax, mixtape = benchmark(TINY, ["softmax", "mixtape"], Setting(), rounds=3, tick=done.append)
    assert order == ["softmax", "softmax's output", "mixtape", "mixtape's output"] * 4
    assert sum(done) == 2 * (2 * 3 + 3)
    assert (softmax["ms_median"], softmax["ms_min"], softmax["ms_max"]) == (2000, 1000, 6000)
    assert (mixtape["ms_median"], mixtape["ms_min"], mixtape["ms_max"]) == (5000, 3000, 7000)
    assert (softmax["time_ratio"], mixtape["time_ratio"]) == (1, 2.5)
    assert (mixtape["output_ms_median"], mixtape["output_ms_min"], mixtape["output_ms_max"]) == (2000, 1000, 4000)
    assert (softmax["output_share"], mixtape["output_share"]) == (0.5, 0.4)
    assert mixtape["tokens_per_second"] == 3 * 6 / 5
    assert mixtape["peak_memory_mb"] == 5
    # V·(E+1), three LSTM layers of sizes 8, 7 and E = 6
    assert softmax["parameters"] == 40 * 7 + 4 * 8 * (6 + 8 + 2) + 4 * 7 * (8 + 7 + 2) + 4 * 6 * (7 + 6 + 2)


def test_what_is_too_large_is_skipped_and_not_run(monkeypatch):
    def run(function, layer, *args):
        if layer == "moc-2":
            raise MemoryError
        return 0

    monkeypatch.setattr(library, "in_fresh_process", run)
    shape = TINY._replace(vocab_size=4000)  # so that scores weigh more than all else
    limit = library.estimate_memory("mos-3", shape) - 1
    done = []
    layers = ["softmax", "moc-2", "mos-3"]
    softmax, moc, mos = benchmark(shape, layers, Setting(), 2, memory_limit=limit, tick=done.append)
    assert softmax["skipped"] is None and softmax["ms_median"] > 0
    assert moc["skipped"].startswith("did not fit in") and moc["ms_median"] is moc["time_ratio"] is None
    assert mos["skipped"].startswith("does not fit in") and mos["peak_memory_mb"] is None
    assert sum(done) == 3 * (2 * 2 + 3)
    table = script.markdown([softmax, moc, mos], {"machine": "this"})
    assert "did not fit in" in table and "does not fit in" in table

    rows = benchmark(shape, ["softmax", "mos-3"], Setting(), 2, memory_limit=0)
    assert [row["time_ratio"] for row in rows] == [None, None]


@pytest.mark.slow
def test_run_from_the_command_line(tmp_path):
    layers = ["softmax", "mos-3", "mixtape"]
    text, scores = "20000:8:16,12", 20000 * 128 * 4 / 1e6  # 10 MB, far above all else
    out, plot = tmp_path / "run.csv", tmp_path / "run.png"
    command = [sys.executable, str(SCRIPT), "--shapes", text, "--rounds", "2", "--threads", "1"]
    command += ["--batch-size", "4", "--segment-length", "32", "--layers", *layers[1:]]
    command += ["--out", str(out), "--plot", str(plot)]
    process = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)
    assert process.returncode == 0, process.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.csv", "run.png"]
    assert plot.read_bytes().startswith(b"\x89PNG") and plot.stat().st_size > 10_000

    with open(out, newline="") as file:
        rows = list(csv.DictReader(file))
    facts = ["machine", "cores", "threads", "load_before", "dtype", "noise", "rounds"]
    assert list(rows[0]) == [*library.COLUMNS, *facts, "python", "torch", "plugin", "commit", "date", "sizes"]
    assert [row["layer"] for row in rows] == layers
    assert [row["hidden_sizes"] for row in rows] == ["16,8", "16,12", "16,12"]
    shape = script.parse_shape(text)._replace(batch_size=4, segment_length=32)
    for row in rows:
        low, median, high = (float(row[name]) for name in ("ms_min", "ms_median", "ms_max"))
        assert 0 < low <= median <= high
        assert float(row["time_ratio"]) == pytest.approx(median / float(rows[0]["ms_median"]))
        assert float(row["tokens_per_second"]) == pytest.approx(1000 * 4 * 32 / median)
        assert float(row["output_share"]) == pytest.approx(float(row["output_ms_median"]) / median)
        # log-probabilities and their gradient at least, K times over for MoS
        least = 2 * scores * (3 if row["layer"] == "mos-3" else 1)
        assert least <= float(row["peak_memory_mb"]) <= library.estimate_memory(row["layer"], shape) / 1e6
        assert row["torch"] == torch.__version__ and row["threads"] == "1" and row["sizes"] == "same"
        assert row["machine"] and row["commit"] and row["date"] and not row["skipped"]

    table = [line for line in process.stdout.splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(layers)
    assert {line.count("|") for line in table} == {14}
    assert f"machine {rows[0]['machine']}, " in process.stdout.splitlines()[0]


@pytest.mark.parametrize("write", [script.write_rows, script.draw])
def test_files_appear_whole_or_not_at_all(write, tmp_path):
    with pytest.raises((KeyError, ValueError)):
        write(str(tmp_path / "run.png"), [dict.fromkeys(library.COLUMNS), {"no such column": 1}], {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "options",
    [
        ["--shapes", "wmt"],
        ["--shapes", "1000:16"],
        ["--shapes", "1000:16:24,0"],
        ["--shapes", "5:16:24"],
        ["--shapes", "1000:0:24"],
        ["--layers", "mos"],
        ["--layers", "mos-0"],
        ["--layers", "transformer"],
        ["--batch-size", "0"],
        ["--segment-length", "0"],
        ["--rounds", "0"],
        ["--threads", "0"],
        ["--memory-limit", "nan"],
        ["--out", "no/such/folder/run.csv"],
        ["--plot", "no/such/folder/run.png"],
        ["--plot", "run.txt"],
        pytest.param(["--device", "cuda"], marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")),
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


def test_defaults_and_softmax_first():
    (shape,) = script.parse([]).shapes
    assert (shape.shape, shape.vocab_size, shape.batch_size, shape.segment_length) == ("ptb", 10000, 12, 70)
    assert shape.layers == ("softmax", "mos-3", "mos-5", "mos-10", "mos-15", "mixtape", "mixtape-no-sharing")
    (shape,) = script.parse(["--layers", "mixtape", "softmax", "moc-3", "mixtape", "--batch-size", "48"]).shapes
    assert shape.layers == ("softmax", "mixtape", "moc-3") and shape.batch_size == 48


@pytest.mark.gpu
def test_run_on_a_gpu():
    shape = TINY._replace(vocab_size=20000, batch_size=16, segment_length=32)
    for row in benchmark(shape, LAYERS, Setting("cuda"), rounds=2):
        assert row["skipped"] is None and row["ms_median"] > 0
        assert row["peak_memory_mb"] >= 512 * 20000 * 4 / 1e6  # log-probabilities in float32
