"""scripts/benchmark_output_layers.py: its formulas against counts by hand and by torch, its search for the largest
batch, its peers, a run, what it skips."""

import csv
import math
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from recipes import check_refusal, load_script

from mixtape_plugin.benchmarks import command_line, workloads
from mixtape_plugin.benchmarks import output_layer_benchmark as library
from mixtape_plugin.benchmarks.command_line import write_outputs
from mixtape_plugin.benchmarks.measuring import Budget, Setting
from mixtape_plugin.benchmarks.output_layer_benchmark import Step, benchmark_output_layers
from mixtape_plugin.benchmarks.workloads import BASELINE, SHAPES, Shape, Variant, layer_options, multiply_adds
from mixtape_plugin.errors import UserError

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmark_output_layers.py"
script = load_script("benchmark_output_layers")

LAYERS = list(layer_options())
TINY = Shape("50:6:10:3:0.2:20", 50, 6, 10, 3, 0.2, 20)


@pytest.fixture(autouse=True)
def same_number_of_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def count_parameters(layer, shape):
    return library.new_row(Variant(layer), shape, None)["parameters"]


def test_multiply_adds_of_penn_treebank_by_hand():
    ptb = SHAPES["ptb"]
    assert multiply_adds("softmax", ptb) == 2_800_000  # 10000·280
    assert multiply_adds("moc", ptb) == 2_800_000 + 2_604_000  # 15·280·620
    assert multiply_adds("mos", ptb) == multiply_adds("mos-15", ptb) == 42_000_000 + 2_604_000
    assert multiply_adds("mos-3", ptb) == 8_400_000 + 520_800
    # 1000 frequent tokens: 3·1000·280, 4·280·620, 3·64·1000 + 3·64·620
    assert multiply_adds("mixtape", ptb) == 2_800_000 + 840_000 + 694_400 + 311_040
    assert multiply_adds("mixtape-no-sharing", ptb) == 2_800_000 + 8_400_000 + 694_400 + 2_039_040
    assert multiply_adds("mixtape-2", ptb) == 2_800_000 + 280_000 + 347_200 + 64_000 + 39_680


@pytest.mark.parametrize("layer", [*LAYERS, "mos-2", "mixtape-3", "mixtape-no-sharing-5"])
def test_multiply_adds_are_what_torch_counts(layer):
    flop_counter = pytest.importorskip("torch.utils.flop_counter")  # torch 2.1 and up
    step = Step(Variant(layer), TINY, Setting())
    with flop_counter.FlopCounterMode(display=False) as counter:
        step()
    k = workloads.num_components(layer, TINY) if workloads.class_of(layer).has_components else 0
    left_out = 10 * (k - 1 if layer.startswith("mixtape") else k)  # gates or priors
    assert counter.get_total_flops() == 6 * 20 * (multiply_adds(layer, TINY) + left_out)


def test_parameters_by_hand():
    embedding, d2 = 50 * (6 + 1), workloads.GATE_DIM
    assert count_parameters("softmax", TINY) == embedding
    for layer, k in (("mos", 3), ("moc-2", 2)):  # contexts with biases, priors without
        assert count_parameters(layer, TINY) == embedding + k * 6 * (10 + 1) + k * 10
    for layer, k, s in (("mixtape", 4, 10), ("mixtape-3", 3, 10), ("mixtape-no-sharing", 4, 50)):
        gates = (k - 1) * (d2 * (10 + 1) + 10) + s * (d2 + k - 1)  # U_k and u_k; v_x and b_x of each frequent token
        assert count_parameters(layer, TINY) == embedding + k * 6 * (10 + 1) + gates


def test_ratios_of_the_paper():
    """The paper's own words on its tables."""

    def speedup(slow, fast, shape, column):
        return workloads.paper_ratio(slow, shape, column) / workloads.paper_ratio(fast, shape, column)

    assert speedup("mos-15", "mixtape", "ptb", "output_layer") == pytest.approx(11.5, abs=0.05)
    for shape, sharing, in_memory in (("ptb", 3.5, 4.3), ("one-billion", 3.2, 4.0)):
        assert speedup("mixtape-no-sharing", "mixtape", shape, "output_layer") == pytest.approx(sharing, abs=0.05)
        found = speedup("mixtape-no-sharing", "mixtape", shape, "output_layer_in_memory")
        assert found == pytest.approx(in_memory, abs=0.05)
    assert speedup("mos-9", "mixtape", "en-fr", "output_layer") == pytest.approx(1.6, abs=0.05)
    assert speedup("mos-9", "mixtape", "en-de", "output_layer_in_memory") == pytest.approx(3.5, abs=0.05)
    for shape, slower in (("ptb", 0.20), ("en-de", 0.34), ("one-billion", 0.6)):  # "20% to 34%", "60%"
        found = workloads.paper_ratio("mixtape", shape, "network_in_memory")
        assert found == pytest.approx(1 + slower, abs=0.02)
    assert workloads.paper_ratio("moc-15", "ptb", "output_layer") is None
    assert workloads.paper_ratio("mixtape", TINY.shape, "output_layer") is None


def test_variants_are_every_layer_in_every_implementation_and_peers_of_softmax():
    assert workloads.variants(["softmax", "mos-3"], ["fused", "eager", "torch"]) == [
        ("softmax", "plain"),
        ("softmax", "fused"),
        ("softmax", "eager"),
        ("softmax", "torch"),
        ("mos-3", "fused"),
        ("mos-3", "eager"),
    ]
    for impl in ("eager", "fused"):
        assert Step(Variant("mixtape", impl), TINY, Setting()).layer.config.output_impl == impl


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("peer", workloads.PEERS)
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch says that it smooths without chunks
def test_peers_compute_the_loss_of_the_eager_softmax(peer, label_smoothing):
    device = "cpu" if peer in ("plain", "torch") else "cuda"
    if (device == "cuda" and not torch.cuda.is_available()) or peer not in workloads.installed_peers(device):
        pytest.skip(f"{peer} is not installed, or there is no GPU")
    if peer == "cut-cross-entropy" and label_smoothing:
        pytest.skip("cut-cross-entropy has no label smoothing")
    dtype = {"plain": "float64", "torch": "float64", "liger": "float32", "cut-cross-entropy": "bfloat16"}[peer]
    setting = Setting(device, dtype, label_smoothing=label_smoothing)
    ours, theirs = (Step(Variant("softmax", impl), TINY, setting) for impl in ("eager", peer))
    theirs.layer.load_state_dict(ours.layer.state_dict())
    losses = [step.loss(ours.features, ours.target) for step in (ours, theirs)]
    tolerance = {"plain": 1e-12, "torch": 1e-12, "liger": 1e-5, "cut-cross-entropy": 2e-2}[peer]
    torch.testing.assert_close(losses[1], losses[0], rtol=tolerance, atol=tolerance, check_dtype=False)
    for loss in losses:
        loss.backward()
    for mine, other in zip(ours.layer.parameters(), theirs.layer.parameters()):
        torch.testing.assert_close(other.grad, mine.grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("layer", LAYERS)
def test_step_reaches_every_parameter_and_drops_the_gradients(layer):
    step = Step(Variant(layer), TINY, Setting())
    reached, trained = {}, {name: p for name, p in step.layer.named_parameters() if p.requires_grad}
    for name, parameter in trained.items():
        parameter.register_hook(lambda grad, name=name: reached.update({name: grad.abs().sum() > 0}))
    assert step() > 0
    assert reached.keys() == trained.keys() and all(reached.values())
    assert len(trained) >= 2 and ("slopes_raw" in trained) == (layer == "plif")
    assert all(parameter.grad is None for parameter in step.layer.parameters())


@pytest.mark.parametrize("name", SHAPES)
def test_noise_is_off_unless_asked_for(name):
    shape = SHAPES[name]._replace(vocab_size=30, embed_dim=4, feature_dim=4)
    for noise in (False, True):
        step = Step(Variant("mixtape"), shape._replace(tokens=5), Setting(dtype="float64", noise=noise))
        assert torch.equal(step.layer(step.features), step.layer(step.features)) is not noise


@pytest.mark.parametrize(
    "shape, layer, contexts, gates",
    [("ptb", "mos", (0.29, True), None), ("ptb", "mixtape", (0.29, True), 0.2), ("en-fr", "mixtape", (0, False), 0.15)],
)
def test_noise_is_the_papers(shape, layer, contexts, gates):
    small = SHAPES[shape]._replace(vocab_size=30, embed_dim=4, feature_dim=4)
    noisy, quiet = (workloads.build_layer(Variant(layer), small, noise=noise).config for noise in (True, False))
    assert (noisy.context_dropout, noisy.locked_context_dropout) == contexts
    assert gates is None or noisy.gate_dropout == gates
    assert (quiet.context_dropout, quiet.gate_noise, quiet.gate_dropout) == (0, 0, 0)


class FakeProduct:
    width = 1000

    def __init__(self, setting):
        pass

    def __call__(self):
        return 0.5  # 10^9 multiply-adds in 500 ms


def test_layers_take_turns_and_medians_leave_the_warm_up_out(monkeypatch):
    seconds = {BASELINE: [100, 1, 2, 6], Variant("mixtape", "fused"): [200, 3, 5, 7]}
    order = []

    class FakeStep:
        def __init__(self, variant, shape, setting, tied_weight):
            self.variant = variant

        def __call__(self):
            order.append(self.variant)
            return seconds[self.variant].pop(0)

    monkeypatch.setattr(library, "Step", FakeStep)
    monkeypatch.setattr(library, "MatrixProduct", FakeProduct)
    monkeypatch.setattr(library, "peak_memory_of_fresh_process", lambda *args: 5_000_000)
    done, variants = [], list(seconds)
    softmax, mixtape = benchmark_output_layers(TINY, variants, Setting(), rounds=3, tick=done.append)
    assert order == variants * 4
    assert sum(done) == library.turns(variants, 3)
    assert (softmax["ms_median"], softmax["ms_min"], softmax["ms_max"]) == (2000, 1000, 6000)
    assert (mixtape["ms_median"], mixtape["ms_min"], mixtape["ms_max"]) == (5000, 3000, 7000)
    assert (softmax["time_ratio"], mixtape["time_ratio"]) == (1, 2.5)
    assert mixtape["us_per_token"] == 5_000_000 / 20
    assert mixtape["peak_memory_mb"] == 5
    # 20 tokens, three products of 50·6 each, in 2 s; against 2·10^9 a second
    assert softmax["matmul_share"] == pytest.approx(20 * 3 * 300 / 2 / 2e9)


def test_prices_are_measured_in_the_same_rounds(monkeypatch):
    order = []

    class FakeStep:
        def __init__(self, variant, shape, setting, tied_weight):
            self.key = variant, setting

        def __call__(self):
            order.append(self.key)
            variant, setting = self.key
            return {"softmax": 1, "mixtape": 2}[variant.layer] + 0.5 * setting.noise + setting.label_smoothing

    monkeypatch.setattr(library, "Step", FakeStep)
    monkeypatch.setattr(library, "MatrixProduct", FakeProduct)
    monkeypatch.setattr(library, "peak_memory_of_fresh_process", lambda *args: 0)
    done, variants = [], [Variant("softmax"), Variant("softmax", "torch"), Variant("mixtape", "fused")]
    softmax, peer, mixtape = benchmark_output_layers(TINY, variants, Setting(), rounds=2, prices=True, tick=done.append)
    assert len(set(order)) == 6 and order == order[:6] * 3
    assert sum(done) == library.turns(variants, 2, prices=True)
    assert (softmax["ms_median"], softmax["noise_ratio"], softmax["smoothing_ratio"]) == (1000, None, 1.1)
    assert (peer["noise_ratio"], peer["smoothing_ratio"]) == (None, None)
    assert (mixtape["ms_median"], mixtape["noise_ratio"], mixtape["smoothing_ratio"]) == (2000, 1.25, 1.05)


def test_what_is_too_large_is_skipped_and_not_run(monkeypatch):
    def run(variant, shape, setting):
        if variant.layer == "moc":
            raise MemoryError
        if variant.impl == "torch":
            raise RuntimeError("not this one\nbecause")
        return 0

    monkeypatch.setattr(library, "peak_memory_of_fresh_process", run)
    done = []
    variants = [BASELINE, Variant("softmax", "torch"), Variant("moc"), Variant("mos"), Variant("mos", "fused")]
    shape = TINY._replace(vocab_size=5000, tokens=4000)
    limit = library.estimate_memory(Variant("mos"), shape, Setting()) - 1
    softmax, peer, moc, mos, fused = benchmark_output_layers(shape, variants, Setting(), 1, limit, tick=done.append)
    assert softmax["skipped"] is None and softmax["ms_median"] > 0
    assert peer["skipped"] == "refuses: not this one"
    assert moc["skipped"].startswith("did not fit in") and moc["ms_median"] is moc["time_ratio"] is None
    assert mos["skipped"].startswith("does not fit in") and mos["peak_memory_mb"] is None
    assert mos["flop_ratio"] > 2.9 and mos["parameters"] > 0
    assert fused["skipped"] is None and fused["time_ratio"] > 0
    assert sum(done) == library.turns(variants, 1)

    done.clear()
    variants = [BASELINE, Variant("mos")]
    rows = benchmark_output_layers(TINY, variants, Setting(), 2, memory_limit=0, prices=True, tick=done.append)
    assert [row["time_ratio"] for row in rows] == [None, None] and sum(done) == library.turns(variants, 2, prices=True)


def test_at_one_memory_budget_each_layer_has_its_largest_batch(monkeypatch):
    a_token = {"softmax": 1000, "mixtape": 4000}  # bytes, beyond weights and gradients

    class FakeStep:
        def __init__(self, variant, shape, setting, tied_weight):
            self.tokens = shape.tokens

        def __call__(self):
            return self.tokens / 1000

    monkeypatch.setattr(library, "Step", FakeStep)
    monkeypatch.setattr(library, "MatrixProduct", FakeProduct)
    monkeypatch.setattr(
        library, "peak_memory_of_fresh_process", lambda variant, shape, _: a_token[variant.layer] * shape.tokens
    )
    shape = TINY._replace(shape="ptb")
    variants = [BASELINE, Variant("mixtape"), Variant("mixtape", "fused")]
    a_token["mos"] = 10**9
    rows = benchmark_output_layers(shape, [*variants, Variant("mos")], Setting(), 1, budget=Budget(500_000, largest=20))
    softmax, mixtape, fused, mos = rows
    weights = 8 * count_parameters("softmax", shape)
    assert softmax["tokens"] == 400 < (500_000 - weights) / 1000 and softmax["fits_more"]  # 20 times the shape's N
    weights = 8 * count_parameters("mixtape", shape)
    exact = (500_000 - weights) // 4000
    assert exact - 2 <= mixtape["tokens"] <= exact and not mixtape["fits_more"]
    assert mixtape["peak_memory_mb"] == 4000 * mixtape["tokens"] / 1e6
    assert mixtape["time_ratio"] == pytest.approx(1)  # of a token
    assert mixtape["paper_ratio"] == 0.90 / 0.40 and mixtape["memory_budget_gb"] == 0.0005
    assert fused["impl"] == "fused"
    assert mos["skipped"].startswith("17 tokens do not fit") and mos["tokens"] is None
    table = script.markdown(rows, {"machine": "this"})
    assert "≥ 400" in table and "17 tokens do not fit" in table


def test_sweep_and_its_plot(monkeypatch, tmp_path):
    monkeypatch.setattr(library, "SWEEP_VOCAB_SIZES", (40, 80))
    monkeypatch.setattr(library, "SWEEP_COMPONENTS", (2, 3))
    monkeypatch.setattr(library, "peak_memory_of_fresh_process", lambda *args: 0)
    rows = library.sweep(TINY, ["softmax", "mos", "mixtape-no-sharing"], ["eager", "fused"], Setting(), 1)
    expected = [("V", 40, 40, 3), ("V", 80, 80, 3), ("K", 2, 50, 2), ("K", 3, 50, 3)]
    points = [(row["sweep"], row["sweep_value"], row["vocab_size"], row["num_components"]) for row in rows]
    assert [point for point, row in zip(points, rows) if row["layer"].startswith("mos-")] == sorted(
        2 * expected, key=expected.index
    )
    names = {row["layer"] for row in rows if row["sweep_value"] == 2}
    assert names == {"softmax", "mos-2", "mixtape-no-sharing-2"}
    assert all(row["time_ratio"] > 0 for row in rows)
    facts = {"machine": "this", "threads": 1, "dtype": "float32", "torch": "2"}
    script.draw(str(tmp_path / "sweep.png"), rows, facts)
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert "| K=3 |" in script.markdown(rows, facts)


# 20000·512 floats are 41 MB: beyond what malloc keeps for reuse, so that the peaks can be told
LARGE = "20000:8:12:3:0.1:512"


def read_csv(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_run_from_the_command_line(tmp_path):
    values = 20000 * 512 * 4 / 1e6
    shape = script.parse_shape(LARGE)
    setting = Setting(noise=True, label_smoothing=0.1)
    limit = library.estimate_memory(Variant("mixtape-no-sharing"), shape, setting) / 1e9 - 0.001
    out = tmp_path / "run.csv"
    command = [sys.executable, str(SCRIPT), "--shapes", LARGE, "--rounds", "2", "--threads", "1", "--noise"]
    command += ["--memory-limit", str(limit), "--out", str(out)]
    command += ["--impls", "eager", "fused", "--label-smoothing", "0.1"]
    process = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)
    assert process.returncode == 0, process.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["run.csv"]

    rows = read_csv(out)
    facts = ["machine", "cores", "threads", "load_before", "dtype", "noise", "label_smoothing", "rounds"]
    assert list(rows[0]) == [*library.COLUMNS, *facts, "python", "torch", "plugin", "commit", "date"]
    expected = [BASELINE, *((layer, impl) for layer in LAYERS for impl in ("eager", "fused"))]
    names = [(workloads.full_name(layer, shape), impl) for layer, impl in expected]
    assert [(row["layer"], row["impl"]) for row in rows] == names
    assert [row["num_components"] for row in rows[1::2]] == ["1", "3", "3", "4", "4", "1", "1", "1", "1"]
    for row, (layer, impl) in zip(rows, expected):
        if (layer, impl) == ("mixtape-no-sharing", "eager"):
            assert row["skipped"].startswith("does not fit in") and row["ms_median"] == ""
            continue
        low, median, high = (float(row[name]) for name in ("ms_min", "ms_median", "ms_max"))
        assert 0 < low <= median <= high < math.inf
        assert float(row["time_ratio"]) == pytest.approx(median / float(rows[0]["ms_median"]))
        # eager: log-probabilities and their gradient at least, K times over for MoS
        least = 2 * values * (3 if layer == "mos" else 1) if impl != "fused" else 0
        most = library.estimate_memory(Variant(layer, impl), shape, setting) / 1e6
        assert least <= float(row["peak_memory_mb"]) <= most, row["layer"]
    for row in rows:
        assert row["torch"] == torch.__version__ and row["threads"] == "1" and row["noise"] == "True"
        assert row["machine"] and row["commit"] and row["date"]

    table = [line for line in process.stdout.splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(rows)
    assert {line.count("|") for line in table} == {16}
    assert f"machine {rows[0]['machine']}, " in process.stdout.splitlines()[0]


@pytest.mark.slow
def test_run_at_one_memory_budget(tmp_path):
    shape, out, layers = script.parse_shape(LARGE), tmp_path / "run.csv", ["softmax", "mos", "mixtape"]
    options = ["--layers", *layers, "--impls", "eager", "fused", "--rounds", "1", "--threads", "1"]
    script.main(["--shapes", LARGE, *options, "--memory-budget", "0.2", "--largest-batch", "1", "--out", str(out)])
    rows = read_csv(out)
    names = [BASELINE, *((workloads.full_name(layer, shape), impl) for layer in layers for impl in ("eager", "fused"))]
    assert [(row["layer"], row["impl"]) for row in rows] == 2 * names
    at_one_budget = rows[len(names) :]
    for row in at_one_budget:
        weights = 8 * count_parameters(row["layer"], shape) / 1e6
        assert row["memory_budget_gb"] == "0.2" and 16 < int(row["tokens"]) <= 512
        assert float(row["peak_memory_mb"]) + weights <= 200
        assert float(row["us_per_token"]) == pytest.approx(1000 * float(row["ms_median"]) / int(row["tokens"]))
    mos, fused_mos = at_one_budget[3:5]
    assert int(mos["tokens"]) < int(fused_mos["tokens"])


def test_a_commit_whose_code_was_changed_is_dirty(tmp_path, monkeypatch):
    def git(*args):
        command = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", *args]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    monkeypatch.setattr(command_line, "ROOT", tmp_path)
    assert command_line.commit() == "unknown"
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "a.py").write_text("1\n")
    git("init", "-q"), git("add", "."), git("commit", "-qm", "x")
    head = git("rev-parse", "HEAD")
    (tmp_path / "notes").write_text("no code\n")
    assert command_line.commit() == head
    (tmp_path / "scripts" / "a.py").write_text("2\n")
    assert command_line.commit() == f"{head} dirty"


def test_csv_appears_whole_or_not_at_all(tmp_path):
    args = Namespace(out=str(tmp_path / "run.csv"), plot=None)
    with pytest.raises(ValueError):
        write_outputs(args, library.COLUMNS, [{"no such column": 1}], {}, None)
    assert list(tmp_path.iterdir()) == []
    args.out = str(tmp_path / "gone" / "run.csv")
    with pytest.raises(UserError, match=f"^--out {args.out} cannot be written: No such file or directory"):
        write_outputs(args, library.COLUMNS, [], {}, None)


@pytest.mark.parametrize(
    "options",
    [
        ["--shapes", "wmt"],
        ["--shapes", "1000:16:24:3:0.1"],
        ["--shapes", "1000:0:24:3:0.1:64"],
        ["--shapes", "1000:16:24:0:0.1:64"],
        ["--shapes", "1000:16:24:3:1.5:64"],
        ["--shapes", "1000:16:24:3:0.1:16"],
        ["--layers", "transformer"],
        ["--layers", "softmax-3"],
        ["--layers", "mos-0"],
        ["--layers", "mos-²"],
        ["--rounds", "0"],
        ["--threads", "0"],
        ["--tokens", "16"],
        ["--memory-limit", "nan"],
        ["--memory-budget", "0.0"],
        ["--memory-budget", "1e+18"],
        ["--largest-batch", "0"],
        ["--largest-batch", "3"],
        ["--label-smoothing", "1.0"],
        ["--impls", "liger"],
        ["--plot", "sweep.png"],
        ["--plot", "sweep.txt"],
        ["--out", "no/such/folder/run.csv"],
        pytest.param(["--device", "cuda"], marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")),
        ["--dtype", "float16"],
    ],
    ids=" ".join,
)
def test_mistakes_get_one_sentence(options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_refusal(script.main, options)
    assert list(tmp_path.iterdir()) == []


def test_outputs_are_refused_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for path in "folder", "", "/dev/shm/no/such/folder/run.csv":
        check_refusal(script.parse, ["--out", path])
    with pytest.raises(UserError, match="^--plot same.png is not allowed, as --out names it"):
        script.parse(["--sweep", "--out", "same.png", "--plot", "same.png"])
    assert script.parse(["--out", "/dev/stdout"]).out == "/dev/stdout"


def test_softmax_is_always_there_and_layers_may_name_their_components():
    assert script.parse(["--layers", "mixtape", "moc"]).layers == ["softmax", "moc", "mixtape"]
    assert script.parse(["--layers", "mixtape", "mos-15", "mos-3"]).layers == ["softmax", "mos-15", "mos-3", "mixtape"]
    assert [shape.shape for shape in script.parse([]).shapes] == ["ptb", "one-billion", "en-de"]
    assert script.parse([]).impls[:2] == ["eager", "fused"]


def test_a_sweep_sets_components_and_has_one_shape():
    assert script.parse(["--sweep"]).shapes == [workloads.SWEEP_SHAPE]
    for options in (["--layers", "mos-3"], ["--shapes", "ptb", "en-de"], ["--memory-budget", "0.1"], ["--prices"]):
        with pytest.raises(UserError, match="--sweep"):
            script.parse(["--sweep", *options])


@pytest.mark.parametrize("options", [["--noise"], ["--label-smoothing", "0.1"], ["--memory-budget", "0.1"]])
def test_prices_are_of_what_is_off(options):
    with pytest.raises(UserError, match="--prices"):
        script.parse(["--prices", *options])


@pytest.mark.gpu
def test_run_on_a_gpu():
    shape = Shape("gpu", 20000, 64, 96, 3, 0.1, 512)
    setting = Setting("cuda", "bfloat16")
    variants = workloads.variants(LAYERS, ["eager", "fused", *workloads.installed_peers("cuda")])
    for row in benchmark_output_layers(shape, variants, setting, rounds=2):
        if row["skipped"] and row["impl"] in workloads.PEERS:
            continue  # a peer may refuse a type or a version of torch
        assert row["skipped"] is None and row["ms_median"] > 0
        if row["impl"] == "eager":
            assert row["peak_memory_mb"] >= 512 * 20000 * 4 / 1e6  # log-probabilities in float32
    budget = Budget(2e8, largest=4)
    for row in benchmark_output_layers(
        shape, workloads.variants(LAYERS, ["eager", "fused"]), setting, 1, budget=budget
    ):
        assert row["skipped"] is None and 16 < row["tokens"] <= 2048
