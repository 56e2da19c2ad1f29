"""scripts/benchmark_networks.py: the networks it compares, its step against torch's own, a run, what it skips."""

import copy
import csv
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from recipes import check_refusal, load_script

from mixtape_plugin.benchmarks import network_benchmark as library
from mixtape_plugin.benchmarks.measuring import Budget, Setting
from mixtape_plugin.benchmarks.network_benchmark import TrainingStep, benchmark_networks
from mixtape_plugin.benchmarks.network_workloads import SHAPES, network_args
from mixtape_plugin.benchmarks.workloads import BASELINE, Variant, paper_ratio, variants

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmark_networks.py"
script = load_script("benchmark_networks")

LAYERS = ("softmax", "moc-2", "mos-3", "mixtape", "mixtape-no-sharing")
TINY = SHAPES["ptb"]._replace(
    shape="tiny", vocab_size=40, embed_dim=6, hidden_sizes="8,7,5", batch_size=3, segment_length=6, layers=LAYERS
)
TRANSLATION = SHAPES["en-de"]._replace(
    shape="tiny", arch="mixtape_transformer_tiny", vocab_size=40, batch_size=3, segment_length=6, layers=LAYERS
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
        ("en-de", "softmax", (1024, 4096), (1024, 4096)),
        ("en-fr", "mixtape", (2048, 8192), (2048, 8192)),
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
    assert options("mos-9", "en-de") == ("mos", 9) and options("mixtape", "en-fr") == ("mixtape", 4)
    assert options("softmax", "en-de")[0] == "softmax"
    assert network_args("mixtape-no-sharing", SHAPES["en-de"]).frequent_ratio == 1
    custom = network_args("softmax", TINY, "own")
    assert (custom.embed_dim, custom.hidden_sizes) == (6, "8,7,6")


def test_figures_of_the_papers():
    # the paper's words: 5% to 18% slower; out of its tables: MoS-15 2.2 times, and 43% slower with 100K words
    for shape, ratio in (("ptb", 1.05), ("en-de", 1.18), ("en-fr", 1.11), ("one-billion", 1.43)):
        assert paper_ratio("mixtape", shape, "network") == pytest.approx(ratio, abs=0.005)
    assert paper_ratio("mos-15", "ptb", "network") == 731 / 328
    assert library.paper_output_share("mixtape", "ptb", False) == 27 / 345
    assert library.paper_output_share("mixtape", "ptb", True) == 0.90 / 3.66
    assert paper_ratio("moc-15", "ptb", "network") is library.paper_output_share("mixtape", "tiny", False) is None
    assert library.mos_paper_ratio("mos-15", "wikitext2", False) == 2.5
    assert library.mos_paper_ratio("mos-15", "wikitext2", True) == 6.4
    assert library.mos_paper_ratio("mixtape", "ptb", False) is library.mos_paper_ratio("mos-9", "en-de", True) is None


@pytest.mark.parametrize("layer, impl", variants(LAYERS, ["eager", "fused"]))
def test_step_is_that_of_sgd_on_the_penalised_loss(layer, impl):
    torch.manual_seed(1)
    step = TrainingStep(Variant(layer, impl), TINY, Setting())
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
    output = expected.decoder.output_projection
    plain = impl == "plain"  # which knows no mask
    scores = torch.nn.functional.linear(features, output.weight, output.bias) if plain else output(features)
    log_probs = scores.log_softmax(-1)
    loss = torch.nn.functional.nll_loss(log_probs.flatten(0, 1), target.flatten()) + 2 * (features**2).mean()
    loss = loss + (extra["last_hidden"][:, 1:] - extra["last_hidden"][:, :-1]).pow(2).mean()
    loss.backward()
    assert torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.25) > 0.25
    torch.optim.SGD(expected.parameters(), lr=1.0, weight_decay=1.2e-6).step()
    for old, new, wanted in zip(before, step.model.parameters(), expected.parameters()):
        assert not torch.equal(old, wanted) and new.grad is None
        torch.testing.assert_close(new, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("layer", LAYERS)
def test_step_of_a_translator_is_that_of_adam_on_the_smoothed_loss(layer, monkeypatch):
    torch.manual_seed(1)
    step = TrainingStep(Variant(layer, "fused"), TRANSLATION, Setting())
    step.model.decoder.output_projection.config.gate_noise = 0.0
    expected = copy.deepcopy(step.model)
    assert expected.training and expected.decoder.dropout_module.p == 0.1
    before = [parameter.clone() for parameter in step.model.parameters()]
    gradients = []
    take = step.optimizer.step

    def record_and_take():
        gradients.extend(parameter.grad.clone() for parameter in step.model.parameters())
        take()

    monkeypatch.setattr(step.optimizer, "step", record_and_take)
    torch.manual_seed(2)
    assert step() > 0

    torch.manual_seed(2)
    inputs, target = step.sample["net_input"], step.sample["target"]
    assert inputs["src_tokens"].shape == target.shape == (3, 6)
    assert (target[:, -1] == 2).all() and torch.equal(inputs["prev_output_tokens"][:, 1:], target[:, :-1])
    features, _ = expected(**inputs, features_only=True)
    log_probs = expected.decoder.output_projection(features).log_softmax(-1).flatten(0, 1)
    v = log_probs.size(1)
    smooth = torch.full_like(log_probs, 0.1 / (v - 1)).scatter(1, target.view(-1, 1), 0.9)
    loss = -(smooth * log_probs).sum(1).mean()
    loss.backward()
    for old, new, gradient, wanted in zip(before, step.model.parameters(), gradients, expected.parameters()):
        torch.testing.assert_close(gradient, wanted.grad, rtol=1e-4, atol=1e-6)
        clear = gradient.abs() > 1e-5  # far above Adam's epsilon: the first step is lr · sign(g)
        torch.testing.assert_close((new - old)[clear], -1e-4 * gradient[clear].sign(), rtol=2e-2, atol=1e-6)
        assert new.grad is None
    assert sum((gradient.abs() > 1e-5).sum() for gradient in gradients) > 1000


@pytest.mark.parametrize("shape", [TINY, TRANSLATION], ids=["language model", "translation"])
@pytest.mark.parametrize("layer", LAYERS)
def test_output_layer_is_timed_with_its_gradients_and_without_traces(layer, shape):
    step = TrainingStep(Variant(layer), shape, Setting())
    before = [parameter.clone() for parameter in step.model.parameters()]
    reached = set()
    for name, parameter in step.model.decoder.output_projection.named_parameters():
        parameter.register_hook(lambda grad, name=name: reached.add(name))
    assert step.output_layer() > 0
    assert reached == {name for name, _ in step.model.decoder.output_projection.named_parameters()}
    for old, new in zip(before, step.model.parameters()):
        assert torch.equal(old, new) and new.grad is None


def test_implementations_of_a_layer_share_its_network(monkeypatch):
    eager = TrainingStep(Variant("mos-3"), TINY, Setting())
    fused = TrainingStep(Variant("mos-3", "fused"), TINY._replace(batch_size=5), Setting(), like=eager)
    assert fused.model is eager.model and fused.optimizer is eager.optimizer
    assert (len(eager.sample["target"]), len(fused.sample["target"])) == (3, 5)
    layer, called = eager.model.decoder.output_projection, []
    for name in ("eager_loss", "fused_loss"):
        loss = getattr(layer, name)
        monkeypatch.setattr(layer, name, lambda *args, name=name, loss=loss: called.append(name) or loss(*args))
    for step in (eager, fused, eager.output_layer, fused.output_layer):
        step()
    assert called == ["eager_loss", "fused_loss"] * 2


def test_the_plain_softmax_shares_its_network_and_leaves_no_trace():
    plain = TrainingStep(BASELINE, TINY, Setting())
    eager = TrainingStep(Variant("softmax"), TINY, Setting(), like=plain)
    layer = plain.model.decoder.output_projection
    plain()
    assert "loss" in vars(layer) and layer.config.output_impl == "eager"
    eager()
    assert "loss" not in vars(layer)


def test_translators_share_all_but_their_output_layers():
    softmax = TrainingStep(Variant("softmax"), TRANSLATION, Setting())
    mixtape = TrainingStep(Variant("mixtape", "fused"), TRANSLATION, Setting(), like=softmax)
    alone = TrainingStep(Variant("mixtape", "fused"), TRANSLATION, Setting())
    assert mixtape.layer.config == alone.layer.config
    sizes = [{name: p.shape for name, p in step.model.named_parameters()} for step in (mixtape, alone)]
    assert sizes[0] == sizes[1]
    assert mixtape.model is softmax.model and mixtape.layer.weight is softmax.layer.weight
    own = [parameter for name, parameter in mixtape.layer.named_parameters() if name not in ("weight", "bias")]
    for step, updates_of_own in ((softmax, 0), (mixtape, 1), (softmax, 1), (mixtape, 2)):
        step()
        assert step.model.decoder.output_projection is step.layer
        state = step.optimizer.optimizer.state
        assert {state[p]["step"] if p in state else 0 for p in own} == {updates_of_own}
    assert state[mixtape.layer.weight]["step"] == 4 and len(own) > 5


class FakeStep(TrainingStep):
    """A step whose seconds are given, by layer and implementation."""

    seconds, output_seconds, order = {}, {}, []

    def __init__(self, variant, shape, setting, sizes, like=None):
        super().__init__(variant, shape, setting, sizes, like)
        self.variant = variant

    def __call__(self):
        self.order.append(self.variant)
        return self.seconds[self.variant].pop(0)

    def output_layer(self):
        self.order.append((self.variant, "output"))
        return self.output_seconds[self.variant].pop(0)


def test_networks_take_turns(monkeypatch):
    mixtape_variant = Variant("mixtape", "fused")
    # the first is the warm-up's
    FakeStep.seconds = {BASELINE: [9, 1, 2, 6], mixtape_variant: [9, 7, 3, 5]}
    FakeStep.output_seconds = {BASELINE: [9, 1, 1, 1], mixtape_variant: [0, 2, 4, 1]}
    FakeStep.order = []
    monkeypatch.setattr(library, "TrainingStep", FakeStep)
    monkeypatch.setattr(library, "in_fresh_process", lambda *args: 5_000_000)
    done = []
    softmax, mixtape = benchmark_networks(TINY, [BASELINE, mixtape_variant], Setting(), rounds=3, tick=done.append)
    turns = [BASELINE, (BASELINE, "output"), mixtape_variant, (mixtape_variant, "output")]
    assert FakeStep.order == turns * 4
    assert sum(done) == 2 * (2 * 3 + 3)
    assert (softmax["ms_median"], softmax["ms_min"], softmax["ms_max"]) == (2000, 1000, 6000)
    assert (mixtape["ms_median"], mixtape["ms_min"], mixtape["ms_max"]) == (5000, 3000, 7000)
    assert (softmax["time_ratio"], mixtape["time_ratio"]) == (1, pytest.approx(2.5))
    assert (mixtape["output_ms_median"], mixtape["output_ms_min"], mixtape["output_ms_max"]) == (2000, 1000, 4000)
    assert (softmax["output_share"], mixtape["output_share"]) == (0.5, 0.4)
    assert (softmax["output_time_ratio"], mixtape["output_time_ratio"]) == (1, 2)
    assert mixtape["tokens_per_second"] == 3 * 6 / 5
    assert mixtape["peak_memory_mb"] == 5 and mixtape["impl"] == "fused"
    # V·(E+1), three LSTM layers of sizes 8, 7 and E = 6
    assert softmax["parameters"] == 40 * 7 + 4 * 8 * (6 + 8 + 2) + 4 * 7 * (8 + 7 + 2) + 4 * 6 * (7 + 6 + 2)


def test_at_one_memory_budget_each_network_has_its_largest_batch(monkeypatch):
    a_column = {"softmax": 1000, "mos-3": 3000, "mixtape": 10**9}  # bytes

    def run(function, variant, shape, *args):
        return 50_000 + a_column[variant.layer] * shape.batch_size

    FakeStep.seconds = {BASELINE: [9, 6], Variant("mos-3"): [9, 8]}
    FakeStep.output_seconds = {BASELINE: [9, 3], Variant("mos-3"): [9, 6]}
    monkeypatch.setattr(library, "TrainingStep", FakeStep)
    monkeypatch.setattr(library, "in_fresh_process", run)
    layers = [BASELINE, Variant("mos-3"), Variant("mixtape")]
    rows = benchmark_networks(TINY._replace(shape="ptb"), layers, Setting(), 1, budget=Budget(80_000, largest=8))
    softmax, mos, mixtape = rows
    assert (softmax["batch_size"], softmax["fits_more"]) == (24, True)  # 8 times 3
    assert (mos["batch_size"], mos["fits_more"], mos["peak_memory_mb"]) == (10, False, 0.08)
    assert (softmax["ms_per_instance"], mos["ms_per_instance"]) == (250, 800)
    assert mos["time_ratio"] == pytest.approx(3.2) and mos["output_time_ratio"] == pytest.approx(600 / 125)
    assert mos["paper_ratio"] == 6.25 / 3.06 and mos["paper_output_ratio"] == 3.37 / 0.40
    assert mixtape["skipped"] == "not one column or sentence fits in 8e-05 GB"
    table = script.markdown(rows, {"machine": "this"})
    assert "| ≥ 24×6 |" in table and "not one column" in table


def test_what_is_too_large_is_skipped_and_not_run(monkeypatch):
    def run(function, variant, *args):
        if variant.layer == "moc-2":
            raise MemoryError
        return 0

    monkeypatch.setattr(library, "in_fresh_process", run)
    shape = TINY._replace(vocab_size=20_000)  # so that scores weigh more than all else
    limit = library.estimate_memory(Variant("mos-3"), shape, "cpu") - 1
    done = []
    layers = [BASELINE, Variant("moc-2"), Variant("mos-3")]
    softmax, moc, mos = benchmark_networks(shape, layers, Setting(), 2, memory_limit=limit, tick=done.append)
    assert softmax["skipped"] is None and softmax["ms_median"] > 0
    assert moc["skipped"].startswith("did not fit in") and moc["ms_median"] is moc["time_ratio"] is None
    assert mos["skipped"].startswith("does not fit in") and mos["peak_memory_mb"] is None
    assert sum(done) == 3 * (2 * 2 + 3)
    table = script.markdown([softmax, moc, mos], {"machine": "this"})
    assert "did not fit in" in table and "does not fit in" in table

    rows = benchmark_networks(shape, [BASELINE, Variant("mos-3")], Setting(), 2, memory_limit=0)
    assert [row["time_ratio"] for row in rows] == [None, None]


@pytest.mark.parametrize("impl", ["eager", "fused"])
@pytest.mark.parametrize("layer", ["softmax", "mixtape"])
def test_memory_of_a_translator_is_within_its_estimate(layer, impl):
    shape = TRANSLATION._replace(vocab_size=20_000, batch_size=16, segment_length=16)
    variant = Variant(layer, impl)
    peak = library.in_fresh_process(library.peak_memory, variant, shape, Setting())
    weights = 4 * 20_000 * 64  # of the embedding, and as much again for its gradient and each of Adam's two moments
    scores = 256 * 20_000 * 4
    assert (
        4 * weights + (2 * scores if impl == "eager" else 0) <= peak <= library.estimate_memory(variant, shape, "cpu")
    )


@pytest.mark.slow
def test_run_from_the_command_line(tmp_path):
    layers = ["softmax", "mos-3", "mixtape"]
    text, scores = "20000:8:16,12", 20000 * 128 * 4 / 1e6  # 10 MB, far above all else
    out, plot = tmp_path / "run.csv", tmp_path / "run.PNG"
    command = [sys.executable, str(SCRIPT), "--shapes", text, "--rounds", "2", "--threads", "1"]
    command += ["--batch-size", "4", "--segment-length", "32", "--layers", *layers[1:]]
    command += ["--memory-budget", "0.15", "--largest-batch", "2", "--out", str(out), "--plot", str(plot)]
    process = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)
    assert process.returncode == 0, process.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.PNG", "run.csv"]
    assert plot.read_bytes().startswith(b"\x89PNG") and plot.stat().st_size > 10_000

    with open(out, newline="") as file:
        rows = list(csv.DictReader(file))
    facts = ["machine", "cores", "threads", "load_before", "dtype", "noise", "rounds"]
    assert list(rows[0]) == [*library.COLUMNS, *facts, "python", "torch", "plugin", "commit", "date", "sizes"]
    expected = variants(layers, ["eager", "fused"])
    assert [(row["layer"], row["impl"]) for row in rows] == 2 * expected
    assert {(row["layer"], row["hidden_sizes"]) for row in rows} == {
        *[("softmax", "16,8"), ("mos-3", "16,12"), ("mixtape", "16,12")]
    }
    shape = script.parse_shape(text)._replace(batch_size=4, segment_length=32)
    at_one_batch, at_one_budget = rows[: len(expected)], rows[len(expected) :]
    for row, variant in zip(at_one_batch, expected):
        median = float(row["ms_median"])
        assert float(row["time_ratio"]) == pytest.approx(median / float(rows[0]["ms_median"]))
        # eager: log-probabilities and their gradient at least, K times over for MoS
        least = 2 * scores * (3 if row["layer"] == "mos-3" else 1) if row["impl"] != "fused" else 0
        assert least <= float(row["peak_memory_mb"]) <= library.estimate_memory(variant, shape, "cpu") / 1e6
        assert (row["batch_size"], row["memory_budget_gb"]) == ("4", "")
    for row in at_one_budget:
        assert row["memory_budget_gb"] == "0.15" and float(row["peak_memory_mb"]) <= 150
        assert 1 <= int(row["batch_size"]) <= 8
    for row in rows:
        low, median, high = (float(row[name]) for name in ("ms_min", "ms_median", "ms_max"))
        assert 0 < low <= median <= high
        assert float(row["tokens_per_second"]) == pytest.approx(1000 * int(row["batch_size"]) * 32 / median)
        assert float(row["output_share"]) == pytest.approx(float(row["output_ms_median"]) / median)
        assert row["torch"] == torch.__version__ and row["threads"] == "1" and row["sizes"] == "same"
        assert row["machine"] and row["commit"] and row["date"] and not row["skipped"]

    table = [line for line in process.stdout.splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(rows)
    assert {line.count("|") for line in table} == {19}
    assert f"machine {rows[0]['machine']}, " in process.stdout.splitlines()[0]


def test_drawing_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    def fill_the_disk(figure, path, **options):
        Path(path).write_bytes(b"\x89PNG")
        raise OSError("No space left on device")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", fill_the_disk)
    row = {**dict.fromkeys(library.COLUMNS), "shape": "tiny", "skipped": "too large"}
    with pytest.raises(OSError, match="No space left"):
        script.draw(str(tmp_path / "run.png"), [row], {"machine": "this", "threads": 1, "torch": "2"})
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
        ["--memory-budget", "1e+18"],
        ["--largest-batch", "0"],
        ["--largest-batch", "3"],
        ["--label-smoothing", "-0.1"],
        ["--out", "no/such/folder/run.csv"],
        ["--plot", "no/such/folder/run.png"],
        ["--plot", "run.txt"],
        pytest.param(["--device", "cuda"], marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")),
    ],
    ids=" ".join,
)
def test_mistakes_get_one_sentence(options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_refusal(script.main, options)
    assert list(tmp_path.iterdir()) == []


def test_defaults_and_softmax_first():
    (shape,) = script.parse([]).shapes
    assert (shape.shape, shape.vocab_size, shape.batch_size, shape.segment_length) == ("ptb", 10000, 12, 70)
    assert shape.layers == ("softmax", "mos-3", "mos-5", "mos-10", "mos-15", "mixtape", "mixtape-no-sharing")
    (shape,) = script.parse(["--layers", "mixtape", "softmax", "moc-3", "mixtape", "--batch-size", "48"]).shapes
    assert shape.layers == ("softmax", "mixtape", "moc-3") and shape.batch_size == 48
    assert [shape.label_smoothing for shape in script.parse(["--shapes", "ptb", "en-de"]).shapes] == [0, 0.1]
    (shape,) = script.parse(["--shapes", "en-fr", "--label-smoothing", "0.0"]).shapes
    assert shape.label_smoothing == 0 and shape.layers[1] == "mos-9"


@pytest.mark.gpu
def test_run_on_a_gpu():
    for tiny in (TINY, TRANSLATION):
        shape = tiny._replace(vocab_size=20000, batch_size=16, segment_length=32)
        for row in benchmark_networks(shape, variants(LAYERS, ["eager", "fused"]), Setting("cuda"), rounds=2):
            assert row["skipped"] is None and row["ms_median"] > 0
            if row["impl"] == "eager":
                assert row["peak_memory_mb"] >= 512 * 20000 * 4 / 1e6  # log-probabilities in float32
