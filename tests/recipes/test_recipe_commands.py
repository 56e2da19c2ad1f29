"""train.sh --print of every recipe: the whole command, the same as ever, and the one that train.sh runs."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from conftest import USER_DIR
from fairseq import options
from recipes import PRINT, ROOT, machine, mistake, output, run

RECIPES = ("multi30k", "one_billion_word", "ptb", "switchboard", "text8", "wikitext2", "wmt14_en_de", "wmt14_en_fr")
# The recipes as they are (what a published number was run with is in its row of runs.csv); on a machine of 8 GPUs,
# REPOSITORY standing for its folder.
COMMANDS = (Path(__file__).parent / "recipe_commands.txt").read_text()


@pytest.fixture(scope="module")
def venv(tmp_path_factory):
    return machine(tmp_path_factory.mktemp("machine") / "venv", fairseq_train=PRINT)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Enough for every train.sh to begin."""
    folder = tmp_path_factory.mktemp("data") / "with a space"
    for name in ("dict.txt", "dict.en.txt", "dict.response.txt", "shard00/dict.txt", "shard01/dict.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("the 1\n")
    return folder


def layers(example, venv):
    """The layers that a train.sh takes, as it says itself."""
    usage = output(example, "train.sh", "--help", MIXTAPE_VENV=venv)
    return re.match(r"usage: train\.sh (\S+) \[", usage)[1].split("|")


def words(command):
    return shlex.split(command.replace("\\\n", " "))


def meaning(command):
    """Program and data of a command, and each flag's values, those that come last."""
    first, flags = [], {}
    values = first
    for word in words(command):
        if word.startswith("--"):
            values = flags[word] = []
        else:
            values.append(word)
    return first, flags


@pytest.mark.parametrize("block", [block.strip() for block in COMMANDS.split("\n\n")], ids=lambda block: block[:60])
def test_the_commands_stay_the_same(block, venv):
    typed, command = block.split("\n", 1)
    dollar, script, *args = shlex.split(typed)
    assert dollar == "$" and args[-1] == "--print"
    printed = output(Path(script).parent.name, Path(script).name, *args, MIXTAPE_VENV=venv)
    assert meaning(printed) == meaning(command.replace("REPOSITORY", str(ROOT)))


@pytest.mark.parametrize("example", RECIPES)
def test_the_readme_scores_what_it_trained(example, venv):
    text = (ROOT / "examples" / example / "README.md").read_text()
    commands = re.findall(r"^examples/\S+?/(train|evaluate)\.sh (.+)$", text, re.MULTILINE)
    assert [script for script, _ in commands[:1]] == ["train"] and "evaluate" in dict(commands)
    for script, args in commands:
        if script == "train":
            _, flags = meaning(output(example, "train.sh", *shlex.split(args), "--print", MIXTAPE_VENV=venv))
        else:
            assert shlex.split(args)[0] == flags["--save-dir"][0]


@pytest.mark.parametrize("example", RECIPES)
def test_every_layer_is_printed_without_data(example, venv, tmp_path):
    found = layers(example, venv)
    assert found[0] == "softmax" and len(set(found)) == len(found) > 2
    for layer in found:
        printed = output(example, "train.sh", layer, "--print", MIXTAPE_VENV=venv, GPUs=0)
        (program, folder), _ = meaning(printed)
        assert program == "fairseq-train" and folder.startswith("data-bin/")
        args = options.parse_args_and_arch(options.get_training_parser(), input_args=words(printed)[1:])
        assert args.output_layer == layer.split("-")[0].rstrip("0123456789") and args.user_dir == USER_DIR
    message = mistake(example, "train.sh", "maxout", MIXTAPE_VENV=venv)
    names = f"{', '.join(found[:-1])} and {found[-1]}"
    assert message == f"train.sh: the output layer is 'maxout', allowed are {names}; see train.sh --help"


@pytest.mark.parametrize("example", RECIPES)
def test_what_is_printed_is_what_runs(example, data, venv, tmp_path):
    """Pasted into a shell, too, with values that a shell would take apart."""
    flags = ["mos7" if example == "text8" else "mos", "--data", data, "--save", tmp_path / "it's", "--seed", 5]
    flags += ["--adam-betas", "(0.9, 0.98)", "--lr", "$HOME*"]
    _, *ran = output(example, "train.sh", *flags, MIXTAPE_VENV=venv).splitlines()
    assert (tmp_path / "it's" / "train.log").exists()
    (tmp_path / "it's" / "train.log").unlink()
    done = run(example, "train.sh", *flags, "--print", MIXTAPE_VENV=venv)
    assert done.returncode == 0 and not (tmp_path / "it's" / "train.log").exists()
    pasted = subprocess.run(
        ["bash", "-c", f'PATH="{venv}/bin:$PATH"; {done.stdout}'], stdout=subprocess.PIPE, encoding="utf-8", check=True
    )
    assert pasted.stdout.splitlines() == ran == words(done.stdout)[1:]
    assert ran[-4:] == ["--adam-betas", "(0.9, 0.98)", "--lr", "$HOME*"]


def test_a_command_for_other_gpus_is_printed(venv):
    """And whether they have bfloat16 is not asked here."""
    flags = ["mixtape", "--print", "--gpus", 4, "--bf16"]
    done = run("wmt14_en_de", "train.sh", *flags, MIXTAPE_VENV=venv, GPUs=1, CAPABILITY=7)
    _, found = meaning(done.stdout)
    assert (found["--distributed-world-size"], found["--update-freq"]) == (["4"], ["2"]) and "--bf16" in found
    assert "train.sh: mixtape, about 215 million parameters; 300000 updates of 32768 tokens, on 4 GPUs" in done.stderr


def test_the_second_stage_is_printed_before_the_first_has_ended(venv):
    _, flags = meaning(output("ptb", "train.sh", "mos", "--finetune", "--print", MIXTAPE_VENV=venv))
    assert flags["--finetune-from-model"] == ["checkpoints/ptb.mos.seed28/checkpoint_best.pt"]
    message = "train.sh: --small has no second stage"
    assert mistake("ptb", "train.sh", "mos", "--finetune", "--small", MIXTAPE_VENV=venv) == message
    message = "train.sh: --long goes with --small: the recipe of the papers is long enough"
    assert mistake("ptb", "train.sh", "mos", "--long", MIXTAPE_VENV=venv) == message
    message = "train.sh: --float32 and --bf16 exclude each other"
    assert mistake("ptb", "train.sh", "mos", "--float32", "--bf16", "--print", MIXTAPE_VENV=venv) == message
    message = "train.sh: --max-tokens 7 does not go with --smoke, whose updates are small ones"
    assert mistake("wmt14_en_de", "train.sh", "mos", "--smoke", "--max-tokens", 7, MIXTAPE_VENV=venv) == message


def test_short_is_what_the_results_have(venv):
    """Of Multi30k, 30 epochs with both dropouts at .2: the flags of these trainings' commands in runs.csv."""
    spelled_out = "--lr-scheduler polynomial_decay --warmup-updates 1000 --total-num-update 3780 --max-epoch 30"
    spelled_out += " --context-scale 4 --dropout 0.2"
    for layer, dropout in (("mixtape", "--context-dropout 0.2"), ("softmax", "")):
        flags = [*spelled_out.split(), *dropout.split()]
        _, long = meaning(output("multi30k", "train.sh", layer, *flags, "--save", "a", "--print", MIXTAPE_VENV=venv))
        _, short = meaning(
            output("multi30k", "train.sh", layer, "--short", "--save", "a", "--print", MIXTAPE_VENV=venv)
        )
        assert short == long


def test_the_log_names_the_hardware(data, tmp_path):
    (tmp_path / "cpuinfo").write_text("model name\t: EPYC\n")
    venv = machine(tmp_path / "venv", fairseq_train="true", nvidia_smi="printf 'H100\\nH100\\n'")
    args = ["softmax", "--data", data, "--save", tmp_path / "save"]
    done = run("ptb", "train.sh", *args, MIXTAPE_VENV=venv, OMP_NUM_THREADS=3, MIXTAPE_CPUINFO=tmp_path / "cpuinfo")
    assert done.returncode == 0, done.stderr
    assert re.match(r"train.sh: commit \S+, on EPYC \(threads: 3\) with 2 H100, command ", done.stdout), done.stdout


@pytest.mark.parametrize("capacity, kept", [({}, "8192"), ({"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0"}, "0")])
def test_multi30k_keeps_the_products_of_all_its_shapes(capacity, kept, data, tmp_path):
    venv = machine(tmp_path / "venv", fairseq_train='echo "kept $ONEDNN_PRIMITIVE_CACHE_CAPACITY"')
    args = ["softmax", "--data", data, "--save", tmp_path / "save"]
    done = run("multi30k", "train.sh", *args, MIXTAPE_VENV=venv, **capacity)
    assert f"kept {kept}\n" in done.stdout, done.stderr


# The recipes that train in bfloat16 on a CPU
@pytest.mark.parametrize("example", ["multi30k", "ptb", "switchboard", "text8", "wikitext2"])
@pytest.mark.parametrize("gpus", [0, 1])
def test_bfloat16_on_a_cpu_that_has_it(example, gpus, data, tmp_path):
    (tmp_path / "with").write_text("flags\t\t: fpu avx512_bf16 sse\n")
    (tmp_path / "without").write_text("flags\t\t: fpu avx512f sse\n")
    kept = 'printf "memory %s %s\\n" "${MALLOC_MMAP_THRESHOLD_-no}" "${MALLOC_TRIM_THRESHOLD_-no}" "$@"'
    venv = machine(tmp_path / "venv", fairseq_train=kept)
    said = "train.sh: on the CPU, in bfloat16, which it multiplies faster; --float32 turns it off\n"
    for cpuinfo, flags in (("with", []), ("with", ["--cpu"]), ("with", ["--float32", "--cpu"]), ("without", [])):
        args = ["softmax", "--data", data, "--save", tmp_path / "save", *flags]
        done = run(example, "train.sh", *args, MIXTAPE_VENV=venv, GPUs=gpus, MIXTAPE_CPUINFO=tmp_path / cpuinfo)
        assert done.returncode == 0, done.stderr
        on_cpu = not gpus or "--cpu" in flags
        expected = on_cpu and cpuinfo == "with" and "--float32" not in flags
        assert ("--bf16" in done.stdout) == expected and done.stderr == (said if expected else "")
        assert "--float32" not in done.stdout.splitlines()[1:]
        assert ("memory 4294967296 8589934592\n" in done.stdout) == on_cpu
        assert ("memory no no\n" in done.stdout) != on_cpu
