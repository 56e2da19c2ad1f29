"""examples/lib/plan_training.py: options, tables of layers, splitting of an update, estimates, what is printed."""

import argparse
import random
import signal
import subprocess
import sys
import types

import pytest
from recipes import load_script

plan_training, print_command = load_script("plan_training"), load_script("print_command")
LAYERS = """
softmax  --output-layer softmax --seed 3 --lr 30 --finetune-lr 5   # the baseline
mos      --output-layer mos --lr 20 --finetune-lr 4 --num-components 2
"""


def recipe(**changed):
    values = {
        "example": "toy", "data": "data-bin/toy", "dictionary": "dict.txt", "options": ["finetune"], "layers": LAYERS,
        "small_layers": None, "updates": None, "update_tokens": None, "save_interval": None, "keep": None,
    }  # fmt: skip
    return argparse.Namespace(**{**values, **changed})


# ------------------------------------------------------------------------------------------------ options, layers


def test_a_row_is_flags_and_settings_of_the_recipe():
    layers = plan_training.read_layers(LAYERS)
    assert list(layers) == ["softmax", "mos"]
    assert layers["softmax"] == (["--output-layer", "softmax", "--lr", "30"], {"seed": "3", "finetune-lr": "5"})
    flags = ["--output-layer", "mos", "--lr", "20", "--num-components", "2"]
    assert layers["mos"] == (flags, {"finetune-lr": "4"})


def test_options_and_what_remains_in_its_order():
    arguments = "--lr 1 --bf16 --seed 7 -x --seed=8 --bf16=1 --save=--data --adam-betas".split() + ["(0.9, 0.98)"]
    values, extra = plan_training.parse_options(arguments, ["bf16", "seed", "save", "gpus"])
    assert values == {"bf16": True, "seed": "8", "save": "--data", "gpus": None}
    assert extra == ["--lr", "1", "-x", "--bf16=1", "--adam-betas", "(0.9, 0.98)"]
    for seed in (["--bf16", "--seed"], ["--seed", "--bf16"]):
        with pytest.raises(ValueError, match="--seed needs a value; see train.sh --help"):
            plan_training.parse_options(seed, ["bf16", "seed"])
    for save in (["--save", ""], ["--save="]):
        with pytest.raises(ValueError, match="--save is empty; see train.sh --help"):
            plan_training.parse_options(save, ["save"])


def test_the_plan_of_a_layer(tmp_path):
    (tmp_path / "dict.txt").write_text("a 1\n")
    variables = plan_training.plan(recipe(), ["mos", "--data", str(tmp_path), "--lr", "1"])
    assert variables["layer"] == "mos" and variables["seed"] == "1" and variables["extra"] == ["--lr", "1"]
    assert variables["save"] == "checkpoints/toy.mos.seed1" and variables["data"] == str(tmp_path)
    assert plan_training.plan(recipe(), ["softmax", "--data", str(tmp_path)])["save"] == "checkpoints/toy.softmax.seed3"
    with pytest.raises(ValueError, match="the output layer is 'moc', allowed are softmax and mos; see train.sh --help"):
        plan_training.plan(recipe(), ["moc"])
    with pytest.raises(ValueError, match="--data nowhere holds no binarized data; run prepare.sh first"):
        plan_training.plan(recipe(), ["mos", "--data", "nowhere"])
    assert plan_training.plan(recipe(), ["mos", "--data", "nowhere", "--print"])["data"] == "nowhere"
    with pytest.raises(ValueError, match="--save runs/12:30 has a colon, .*: choose another one"):
        plan_training.plan(recipe(), ["mos", "--data", str(tmp_path), "--save", "runs/12:30"])
    for given in ["--save-dir", "x"], ["--save-dir=x"]:
        with pytest.raises(ValueError, match="^--save-dir is not allowed, .*: give --save$"):
            plan_training.plan(recipe(), ["mos", "--data", str(tmp_path), *given])


def test_the_second_stage_has_its_own_learning_rate(tmp_path):
    (tmp_path / "dict.txt").write_text("a 1\n")
    arguments = ["mos", "--finetune", "--data", str(tmp_path), "--save", str(tmp_path)]
    with pytest.raises(ValueError, match="holds no checkpoint_best.pt; run train.sh mos without --finetune first"):
        plan_training.plan(recipe(), arguments)
    assert plan_training.plan(recipe(), [*arguments, "--print"])["save"] == f"{tmp_path}/finetuned"
    (tmp_path / "checkpoint_best.pt").write_bytes(b"")
    variables = plan_training.plan(recipe(), arguments)
    stage = ["--finetune-from-model", f"{tmp_path}/checkpoint_best.pt", "--averaging-epoch", "0"]
    flags = ["--output-layer", "mos", "--lr", "4", "--num-components", "2", *stage, "--stop-when-nonmonotone"]
    assert variables["layer_flags"] == flags


def test_usage_names_every_layer_option_and_default():
    first, *lines = plan_training.usage(recipe()).splitlines()
    options = "[--finetune] [--data DIR] [--save DIR] [--seed N] [--print]"
    assert first == f"usage: train.sh softmax|mos {options} [flags of fairseq-train, which win over those here]"
    assert [line.split()[0] for line in lines] == ["--finetune", "--data", "--save", "--seed", "--print"]
    assert lines[1].endswith("(default: data-bin/toy)") and lines[3].endswith("default: 3 for softmax, 1 for mos")


# ------------------------------------------------------------------------------------------------------ an update


def test_an_update_is_split_without_changing_its_size():
    rng = random.Random(1)
    cases = {(32768, 1, 4096): (8, 4096), (32768, 8, 4096): (1, 4096), (32768, 16, 4096): (1, 2048)}
    cases.update({(32768, 3, 4096): (3, 3640), (32768, 1, 100_000): (1, 32768), (100, 7, 1): None})
    for case, split in cases.items():
        if split:
            assert plan_training.split_update(*case) == split
    cases = [*cases, *((rng.randint(100, 40_000), rng.randint(1, 70), rng.randint(1, 9_000)) for _ in range(200))]
    refused = 0
    for tokens, gpus, most in cases:
        steps = next(n for n in range(1, tokens + 2) if gpus * n * most >= tokens)  # the fewest that suffice
        if tokens // (gpus * steps) == 0:
            with pytest.raises(ValueError, match=f"--max-tokens is {most}, too few for an update of {tokens} "):
                plan_training.split_update(tokens, gpus, most)
            refused += 1
            continue
        split = plan_training.split_update(tokens, gpus, most)
        assert split == (steps, tokens // (gpus * steps)) and split[1] <= most
    assert 0 < refused < 20
    with pytest.raises(ValueError, match="--gpus is 101, more than an update has tokens, 100"):
        plan_training.split_update(100, 101, 5)


def test_estimate():
    """By hand: 6 x 2e8 x 1000 x 5e5 operations; 3 x 4 bytes of 100 million parameters a checkpoint."""
    shape = {"updates": 500_000, "gpus": 2, "update_freq": 5, "max_tokens": 100, "device": "GPU", "checkpoints": 10}
    model = {"layer": "mos", "parameters": 100.0, "multiplications": 200.0, "save": "folder", **shape}
    size, time, memory, disk = plan_training.estimate(**model, bf16=False, free=11.0, there=1.5)
    assert size == (
        "mos, about 100 million parameters; 500000 updates of 1000 tokens, on 2 GPUs 100 at once, 5 times an update"
    )
    assert time.startswith("time: about 6e+17 floating-point operations, which is 2 hours at 100 TFLOP/s")
    assert memory.startswith("memory of each GPU: about 2 GB ") and "what 100 tokens need" in memory
    assert disk == "disk: about 12 GB for 10 checkpoints in folder; 11 GB are free"
    *_, disk = plan_training.estimate(**model, bf16=True, free=10.0, there=1.5)
    assert disk.endswith("; 10 GB are free, WHICH IS TOO LITTLE")


def test_space_counts_the_checkpoints_that_are_there(tmp_path):
    (tmp_path / "save").mkdir()
    (tmp_path / "save" / "checkpoint_last.pt").write_bytes(b"x" * 2_000_000)
    (tmp_path / "save" / "train.log").write_bytes(b"x" * 2_000_000)
    free, there = plan_training.disk_space(str(tmp_path / "save"))
    assert there == pytest.approx(2e-3, rel=0.05) and free > 0
    assert plan_training.disk_space(str(tmp_path / "not" / "yet"))[1] == 0


# ----------------------------------------------------------------------------------------------------- precision


@pytest.mark.parametrize(
    "vendor, flags, faster",
    [
        ("AuthenticAMD", "avx512_bf16", True),
        ("AuthenticAMD", "avx512f bf16x", False),
        ("GenuineIntel", "avx512_bf16 amx_bf16 amx_tile", True),
        ("GenuineIntel", "avx512_bf16", False),
    ],
)
def test_bfloat16_of_a_processor(vendor, flags, faster, tmp_path):
    (tmp_path / "cpuinfo").write_text(f"vendor_id\t: {vendor}\nflags\t\t: fpu {flags} sse\n")
    assert plan_training.multiplies_faster_in_bfloat16(str(tmp_path / "cpuinfo")) == faster
    assert not plan_training.multiplies_faster_in_bfloat16(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("float32", [True, False])
@pytest.mark.parametrize("gpus", [0, 1])
def test_precision_on_a_cpu(on_cpu, float32, gpus, tmp_path, monkeypatch, capsys):
    (tmp_path / "cpuinfo").write_text("flags : avx512_bf16\n")
    monkeypatch.setenv("MIXTAPE_CPUINFO", str(tmp_path / "cpuinfo"))
    torch = types.SimpleNamespace(cuda=types.SimpleNamespace(is_available=lambda: gpus > 0))
    monkeypatch.setattr(plan_training, "import_torch", lambda: torch)
    variables = plan_training.cpu_precision(on_cpu, float32, str(tmp_path))
    trains_on_cpu = on_cpu or not gpus
    assert ("export MALLOC_TRIM_THRESHOLD_" in variables) == trains_on_cpu
    assert variables["precision"] == (["--bf16"] if trains_on_cpu and not float32 else [])
    assert ("in bfloat16" in capsys.readouterr().err) == (trains_on_cpu and not float32)
    monkeypatch.setenv("MIXTAPE_CPUINFO", str(tmp_path / "nowhere"))
    assert plan_training.cpu_precision(on_cpu, float32, str(tmp_path))["precision"] == []


@pytest.mark.parametrize("flag", ["", "--amp", "--fp16", "--memory-efficient-fp16"])
def test_another_precision_of_fairseqs_is_the_only_one(flag, tmp_path, monkeypatch):
    (tmp_path / "cpuinfo").write_text("flags : avx512_bf16\n")
    monkeypatch.setenv("MIXTAPE_CPUINFO", str(tmp_path / "cpuinfo"))
    (tmp_path / "dict.txt").write_text("a 1\n")
    monkeypatch.chdir(tmp_path)
    arguments = ["mos", "--data", str(tmp_path), "--cpu", *filter(None, [flag])]
    variables = plan_training.plan(recipe(options=["float32"]), arguments)
    assert variables["precision"] == ([] if flag else ["--bf16"])


@pytest.mark.parametrize("gpus", [0, 1])
def test_a_training_keeps_its_precision(gpus, tmp_path, monkeypatch):
    """fairseq refuses to go on with the optimizer of another one."""
    (tmp_path / "cpuinfo").write_text("flags : avx512_bf16\n")
    monkeypatch.setenv("MIXTAPE_CPUINFO", str(tmp_path / "cpuinfo"))
    torch = types.SimpleNamespace(cuda=types.SimpleNamespace(is_available=lambda: gpus > 0))
    monkeypatch.setattr(plan_training, "import_torch", lambda: torch)
    start = "INFO | fairseq_cli.train | {{'common': {{'fp16': False, 'bf16': {}, 'tpu': False}}}}\n"
    saved = "INFO | fairseq.checkpoint_utils | Saved checkpoint save/checkpoint_last.pt (epoch 1 @ 2 updates)\n"
    default = [] if gpus else ["--bf16"]

    def precision(*lines, float32=False):
        (tmp_path / "train.log").write_text("".join(lines))
        return plan_training.cpu_precision(False, float32, str(tmp_path))["precision"]

    assert precision("begun\n", start.format(False), saved) == default  # no checkpoint is there
    (tmp_path / "checkpoint_last.pt").write_bytes(b"")
    assert precision("begun\n", start.format(False)) == default  # none of this training's
    assert precision(start.format(True), start.format(False), saved, saved, start.format(True)) == []
    assert precision(start.format(False), start.format(True), saved, start.format(False)) == ["--bf16"]
    with pytest.raises(
        ValueError, match=f"--float32 is not for {tmp_path}, which was begun in bfloat16; choose another"
    ):
        precision(start.format(True), saved, float32=True)


# ------------------------------------------------------------------------------------------- whose folder it is


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Writes the log of commands, typed in bash, as train.sh and fairseq-train do; the last one saved a checkpoint."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dict.txt").write_text("a 1\n")

    def write(folder, *commands, saved=True):
        folder = tmp_path / folder
        folder.mkdir(parents=True, exist_ok=True)
        log = ""
        for command in commands:
            bash = ["bash", "-c", "printf ' %q' train.sh \"$@\"", "_", *command]
            typed = subprocess.run(bash, capture_output=True, check=True, env={"LC_ALL": "C"}).stdout.decode()
            log += f"train.sh: commit 1a2b3c4, on a processor, command{typed}\nnum_updates=1\n"
        if saved:
            log += " | INFO | fairseq.checkpoint_utils | Saved checkpoint checkpoint_last.pt (epoch 1 @ 1 updates)\n"
        with open(folder / "train.log", "a") as file:
            file.write(log)
        for name in ("checkpoint_last.pt", "checkpoint_best.pt"):
            (folder / name).touch()

    return write


def planned(*arguments):
    return plan_training.plan(recipe(data="data", options=["finetune", "max-tokens"]), list(arguments))["save"]


MOS = ("mos", "--adam-betas", "(0.9, 0.98)", "--lr", "1")


@pytest.mark.parametrize(
    "arguments",
    [
        MOS,
        ("mos", "--lr=1", "--adam-betas", "(0.9, 0.98)", "--seed", "1"),  # the same
        (*MOS, "--num-workers", "0", "--max-tokens", "9", "--distributed-port=1", "--log-format", "json", "--cpu"),
        (*MOS, "--data", "data"),
        ("mos", "--lr", "2", *MOS[1:]),  # the last one counts
        ("mos", "--seed", "2"),  # another folder
        ("softmax", "--lr", "1"),
        ("mos", "--lr", "3", "--save", "checkpoints/toy.mos.seed1"),  # asked for
        ("mos", "--lr", "3", "--print"),
        (*MOS, "--finetune"),
        ("mos", *MOS[1:3], "--lr", "3", "--averaging-epoch", "1", "--finetune"),  # the second stage's own
    ],
)
def test_a_training_goes_on_in_its_default_folder(arguments, trained):
    trained("checkpoints/toy.mos.seed1", ["mos", "--lr", "x"], saved=False)  # nothing came of it
    trained("checkpoints/toy.mos.seed1", MOS)
    assert planned(*arguments).startswith("checkpoints/toy.")


@pytest.mark.parametrize(
    "arguments",
    [
        ("mos",),
        MOS[:3],
        (*MOS, "--lr", "3"),
        (*MOS, "--frequent-ratio", "1"),
        (*MOS, "--data=other"),
        ("mos", "--finetune"),
        (*MOS, "--frequent-ratio", "1", "--finetune"),
    ],
)
def test_another_training_does_not_go_on_in_a_default_folder(arguments, trained, tmp_path):
    """It would resume what is there, or take its weights for the second stage."""
    trained("checkpoints/toy.mos.seed1", ["mos"])
    trained("checkpoints/toy.mos.seed1", MOS)  # asked for by --save, or in the place of what was removed
    (tmp_path / "other").symlink_to(tmp_path / "data")
    message = r"checkpoints/toy.mos.seed1 has a training by another command, train.sh mos .*0.98.* --lr 1: choose .*"
    with pytest.raises(ValueError, match=message + "give --save checkpoints/toy.mos.seed1 to go on"):
        planned(*arguments)


def test_another_second_stage_does_not_go_on_in_the_first_ones_folder(trained):
    trained("checkpoints/toy.mos.seed1", ["mos"])
    trained("checkpoints/toy.mos.seed1/finetuned", ["mos", "--finetune", "--lr", "3"])
    assert planned("mos", "--finetune", "--lr", "3") == "checkpoints/toy.mos.seed1/finetuned"
    message = (
        "seed1/finetuned has a training .*, train.sh mos --finetune --lr 3: .* give --save checkpoints/toy.mos.seed1 "
    )
    with pytest.raises(ValueError, match=message):
        planned("mos", "--finetune")
    assert planned("mos", "--finetune", "--save", "checkpoints/toy.mos.seed1") == "checkpoints/toy.mos.seed1/finetuned"


@pytest.mark.parametrize(
    "log", ["", "train.sh: commit 1a2b3c4, command train.sh mos --user 'a\n", "train.sh: commit 1, command t \\\n", "ä"]
)
def test_a_command_that_cannot_be_read_is_let_pass(log, trained, tmp_path):
    trained("checkpoints/toy.mos.seed1", ["mos", "--user", "ä"])  # $'\303\244'
    assert planned("mos")
    saved = "Saved checkpoint checkpoint_last.pt (epoch 1 @ 1 updates)\n"
    (tmp_path / "checkpoints" / "toy.mos.seed1" / "train.log").write_text(log + saved, encoding="latin-1")
    assert planned("mos")


def test_a_trailing_blank_and_a_broken_line_before(trained, tmp_path):
    log = tmp_path / "checkpoints" / "toy.mos.seed1" / "train.log"
    log.parent.mkdir(parents=True)
    log.write_text("broken off\0")
    trained("checkpoints/toy.mos.seed1", ["mos", "--user", "a "])
    assert planned("mos", "--user", "a ")
    with pytest.raises(ValueError, match="another command"):
        planned("mos")


# ------------------------------------------------------------------------------------------------- for the shell

ARGUMENTS = ["it's", "(0.9, 0.98)", "$HOME `x` \\", "", "two\nlines", "--lr", "*", "ä"]


def test_variables_reach_the_shell_unchanged():
    code = plan_training.assignments({"a": ARGUMENTS, "max-tokens": 5, "b": None, "c": True, "d": "$x y", "e": []})
    code += '\nprintf "%s\\0" "$max_tokens" "$b" "$c" "$d" "${#e[@]}" "${a[@]}"'
    done = subprocess.run(["bash", "-c", code], stdout=subprocess.PIPE, check=True)
    assert done.stdout.decode().split("\0")[:-1] == ["5", "", "1", "$x y", "0", *ARGUMENTS]


def test_a_printed_command_can_be_pasted():
    command = ["printf", "%s\\0", *ARGUMENTS, *(f"--flag{n}" for n in range(40)), "-1"]
    text = print_command.format_command(command)
    done = subprocess.run(["bash", "-c", text], stdout=subprocess.PIPE, check=True)
    assert done.stdout.decode().split("\0")[:-1] == command[2:]
    assert max(map(len, text.splitlines())) < 120


def test_a_reader_that_has_enough():
    words = [f"--flag{n} value" for n in range(20_000)]
    command = [sys.executable, print_command.__file__, *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait() == -signal.SIGPIPE
