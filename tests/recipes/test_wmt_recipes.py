"""examples/wmt14_en_{de,fr}: what train.sh and evaluate.sh make of their options; they run in
test_prepare_translation.py."""

import math
import os
import re
import shutil
from unittest import mock

import pytest
import torch
from conftest import USER_DIR, build_model, make_dictionary
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.distributed import utils as distributed
from recipes import HEADER, PRINT, ROOT, files, machine, mistake, output, run, stub

from mixtape_plugin.benchmarks.workloads import SHAPES, multiply_adds

EXAMPLES = {"wmt14_en_de": "de", "wmt14_en_fr": "fr"}
# The paper's table of hyper-parameters, constant of the learning rate and number of steps.
PAPER = {
    "wmt14_en_de": {"d": 1024, "constant": 2.5, "updates": 300_000, "dropout": 0.3, "gate_dropout": 0.2},
    "wmt14_en_fr": {"d": 2048, "constant": 2.0, "updates": 1_200_000, "dropout": 0.25, "gate_dropout": 0.15},
}


@pytest.fixture(scope="module", params=EXAMPLES)
def example(request):
    return request.param


# --------------------------------------------------------------------------------------------- flags of train.sh


@pytest.fixture(scope="module")
def no_data(tmp_path_factory):
    """Enough for train.sh to begin."""
    folder = tmp_path_factory.mktemp("data")
    for lang in ("en", "de", "fr"):
        (folder / f"dict.{lang}.txt").write_text("the 1\n")
    return folder


@pytest.fixture(scope="module")
def printing(tmp_path_factory):
    """A fairseq-train that prints its arguments, one a line, on a machine of $GPUs GPUs, 8 unless told."""
    return machine(tmp_path_factory.mktemp("printing") / "venv", fairseq_train=PRINT)


def flags_of(example, no_data, venv, save, *args, **environment):
    """What train.sh hands to fairseq-train, as fairseq reads it; and what it says before."""
    done = run(example, "train.sh", *args, "--data", no_data, "--save", save, MIXTAPE_VENV=venv, **environment)
    assert done.returncode == 0, done.stderr
    header, *flags = done.stdout.splitlines()
    assert re.match(rf"{HEADER}.*examples/{example}/train\.sh {args[0]} ", header)
    assert flags[flags.index("--user-dir") + 1] == USER_DIR
    return options.parse_args_and_arch(options.get_training_parser(), input_args=flags), done.stderr


def count_parameters(arch, layer):
    with torch.device("meta"):
        model = build_model(arch, make_dictionary(31_996), output_layer=layer)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("layer", ["softmax", "mos", "moc", "mixtape"])
def test_flags_are_the_papers(example, layer, no_data, printing, tmp_path):
    args, said = flags_of(example, no_data, printing, tmp_path / "save", layer, "--gpus", 8)
    paper = PAPER[example]
    assert args.arch == f"mixtape_transformer_{example.replace('14', '')}_big" and args.output_layer == layer
    assert args.encoder_embed_dim == args.decoder_embed_dim == paper["d"]
    assert args.num_components == (9 if layer in ("mos", "moc") else 4)
    assert (args.dropout, args.attention_dropout, args.gate_dropout) == (paper["dropout"], 0.15, paper["gate_dropout"])
    # lr = c d^-.5 min(1, s/w) max(s, w)^-.5 is fairseq's, with a peak of c / sqrt(d w) after w updates
    assert args.lr == [pytest.approx(paper["constant"] / math.sqrt(paper["d"] * 16_000), rel=1e-4)]
    assert (args.lr_scheduler, args.warmup_updates, args.warmup_init_lr) == ("inverse_sqrt", 16_000, 0)
    assert (args.optimizer, args.adam_betas, args.adam_eps) == ("adam", "(0.9, 0.997)", 1e-9)
    assert (args.label_smoothing, args.clip_norm, args.max_update) == (0.1, 0, paper["updates"])
    assert (args.max_tokens, args.update_freq, args.distributed_world_size) == (4096, [1], 8)
    assert getattr(args, "output_impl", "auto") == "auto" and not args.bf16 and args.seed == 1
    # the last ten checkpoints, which evaluate.sh averages, are at hand in the end
    assert paper["updates"] % args.save_interval_updates == 0 and args.keep_interval_updates == 10

    count = count_parameters(args.arch, layer)
    assert f"{layer}, about {count / 1e6:.0f} million parameters; {paper['updates']} updates of 32768 tokens" in said
    disk = re.search(rf"disk: about (\d+) GB for 12 checkpoints in {tmp_path}/save; ", said)[1]
    assert float(disk) == pytest.approx(12 * count * 12 / 1e9, abs=0.6)
    shape = SHAPES[example[-5:].replace("_", "-")]
    name = f"{layer}-9" if layer in ("mos", "moc") else layer
    beyond = multiply_adds(name, shape) - multiply_adds("softmax", shape)
    operations = float(re.search(r"time: about ([\d.e+]+) floating", said)[1])
    assert operations == pytest.approx(
        6 * (count_parameters(args.arch, "softmax") + beyond) * 32_768 * paper["updates"], rel=0.05
    )


def test_later_flags_win_and_batches_fit_the_gpus(example, no_data, printing, tmp_path):
    flags = ["--gpus", 2, "--max-tokens", 2048, "--lr", "1e-4", "--bf16"]
    args, said = flags_of(example, no_data, printing, tmp_path / "save", "mos", *flags)
    assert (args.max_tokens, args.update_freq, args.distributed_world_size) == (2048, [8], 2)
    assert args.lr == [1e-4] and args.bf16 and "on 2 GPUs 2048 at once, 8 times an update" in said


def test_gpus_are_those_that_are_visible(no_data, printing, tmp_path):
    example, save = "wmt14_en_de", tmp_path / "save"
    args, _ = flags_of(example, no_data, printing, save, "mixtape", GPUs=4)
    assert (args.distributed_world_size, args.max_tokens, args.update_freq) == (4, 4096, [2])
    args, _ = flags_of(example, no_data, printing, save, "mixtape", "--gpus", 4, GPUs=4)
    assert args.distributed_world_size == 4
    args, _ = flags_of(example, no_data, printing, save, "mixtape", "--cpu", GPUs=4)
    assert (args.distributed_world_size, args.max_tokens, args.update_freq) == (1, 4096, [8])
    for flags in ([], ["--gpus", 1]):
        args, said = flags_of(example, no_data, printing, save, "mixtape", *flags, GPUs=0)
        assert args.distributed_world_size == 1 and "train.sh: no GPU is visible, training on the CPU\n" in said


def test_more_gpus_than_are_visible(no_data, printing, tmp_path):
    """Before fairseq-train fails an assertion; but under srun, other nodes have some, too."""
    example, flags = "wmt14_en_de", ["mixtape", "--gpus", 8]
    save = tmp_path / "save"
    for visible in (0, 7):
        message = f"train.sh: --gpus is 8, more than the {visible} that are visible; those of other nodes count "
        args = [example, "train.sh", *flags, "--data", no_data, "--save", save]
        assert mistake(*args, MIXTAPE_VENV=printing, GPUs=visible) == message + "under srun only"
        for cpu in ("--cpu", "--smoke"):
            message = "train.sh: --gpus is 8, and training on the CPU uses none"
            assert mistake(*args, cpu, MIXTAPE_VENV=printing, GPUs=visible) == message
    assert not save.exists()
    slurm = {"SLURM_STEP_NODELIST": "node[1-2]", "SLURM_NNODES": 2, "SLURM_PROCID": 0}
    args = [example, "train.sh", *flags, "--data", no_data, "--save", save]
    message = "train.sh: --gpus is 8, more than the 6 that are visible; those of other nodes count under srun only"
    assert mistake(*args, MIXTAPE_VENV=printing, GPUs=3, **slurm) == message
    args, _ = flags_of(example, no_data, printing, save, *flags, GPUs=4, **slurm)
    assert (args.distributed_world_size, args.max_tokens, args.update_freq) == (8, 4096, [1])


def test_bf16_only_where_the_gpu_has_it(no_data, printing, tmp_path):
    flags = ["mixtape", "--gpus", 1, "--bf16", "--data", no_data, "--save", tmp_path / "save"]
    message = "train.sh: --bf16 is not for this GPU, which has no bfloat16; use fairseq-train's --fp16"
    assert mistake("wmt14_en_de", "train.sh", *flags, MIXTAPE_VENV=printing, CAPABILITY=7) == message
    assert not (tmp_path / "save").exists()
    assert "\n--bf16\n" in output("wmt14_en_de", "train.sh", *flags, MIXTAPE_VENV=printing, CAPABILITY=8)


@pytest.mark.parametrize("tasks_per_node", [1, 8])
def test_slurm(tasks_per_node, no_data, printing, tmp_path, monkeypatch):
    """As the second node's first task sees it; fairseq's own launcher makes of it 16 processes, and who is who."""
    venv = shutil.copytree(printing, tmp_path / "venv")
    hosts = '[ "$*" = "show hostnames node[1-2]" ] && printf "node1\\nnode2\\n"'
    shutil.copy(stub(tmp_path / "slurm", scontrol=hosts) / "bin" / "scontrol", venv / "bin")
    slurm = {"SLURM_STEP_NODELIST": "node[1-2]", "SLURM_NNODES": 2, "SLURM_NTASKS_PER_NODE": tasks_per_node}
    slurm.update({"SLURM_NODEID": 1, "SLURM_PROCID": tasks_per_node, "SLURM_LOCALID": 0})
    save = tmp_path / "save"
    args, _ = flags_of("wmt14_en_de", no_data, venv, save, "mixtape", "--distributed-port", 12345, **slurm)
    assert (args.distributed_world_size, args.max_tokens, args.update_freq) == (16, 2048, [1])
    assert not (save / "train.log").exists()  # the first task's

    for name, value in slurm.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("PATH", f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}")
    config = convert_namespace_to_omegaconf(args).distributed_training
    with mock.patch.object(torch.cuda, "device_count", lambda: 8), mock.patch.object(torch.cuda, "set_device"):
        distributed.infer_init_method(config)
    assert config.distributed_init_method == "tcp://node1:12345"
    assert (config.distributed_world_size, config.distributed_rank) == (16, 8)
    assert config.distributed_no_spawn == (tasks_per_node == 8)


# ----------------------------------------------------------------------------------------- commands of evaluate.sh


@pytest.mark.parametrize("model, bpe", [("codes", "subword_nmt"), ("spm.model", "sentencepiece")])
def test_commands_of_evaluation(example, model, bpe, tmp_path):
    target, data, save = EXAMPLES[example], tmp_path / "data", tmp_path / "save"
    (data / "text").mkdir(parents=True)
    (data / "text" / model).write_text("")
    save.mkdir()
    said = f'echo "${{0##*/}} $*" >>{tmp_path}/called'
    venv = stub(
        tmp_path / "venv",
        python=f'[ "$1" = -c ] || {{ {said}; }}; echo "score"',  # -c: a checksum
        sacrebleu=said,
        fairseq_validate=f'{said}; printf "| %s | wps 3\\n" "nll_loss 9 | ppl 512" "nll_loss 2.5 | ppl 5.66"',
        fairseq_generate=f'{said}; printf "H-%s\\t-1\\t%s\\n" 2 "c ." 10 "d ." 0 "a , b ."; printf "D-0\\t-1\\tx\\n"',
        sacremoses=f"{said}; sed 's/ \\([.,]\\)/\\1/g'",
    )
    flags = ["--data", data, "--test-set", "wmt14/full", "--last", 5, "--max-tokens", 999]
    printed = output(example, "evaluate.sh", save, *flags, MIXTAPE_VENV=venv)
    assert printed == "score\ntest nll_loss 2.5 | ppl 5.66\nscore\n"
    assert (save / "test.hyp").read_text() == "a, b.\nc.\nd.\n"  # in the order of the test set
    bleu, average, validate, generate, moses, score = (tmp_path / "called").read_text().splitlines()
    assert bleu == f"sacrebleu --test-set wmt14/full --language-pair en-{target} --echo ref"
    scripts = f"python {ROOT}/scripts"
    assert average == f"{scripts}/average_checkpoints.py --last 5 {save} --by updates --output {save}/average.pt"
    assert validate.endswith(" --task translation --valid-subset test --log-format simple --max-tokens 999")
    assert (
        f"--gen-subset test --beam 4 --lenpen 0.6 --post-process {bpe} " in generate and "--max-tokens 999" in generate
    )
    assert moses == f"sacremoses -q -l {target} detokenize"
    assert score == (
        f"{scripts}/score.py --hypotheses {save}/test.hyp --test-set wmt14/full "
        f"--source-lang en --target-lang {target} --json {save}/score.json"
    )

    (data / "text" / f"raw.valid.{target}").write_text("a\n")
    (tmp_path / "called").unlink()
    printed = output(example, "evaluate.sh", save, *flags, "--valid", MIXTAPE_VENV=venv)
    assert printed == "score\ntest nll_loss 2.5 | ppl 5.66\nscore\nvalidation text:\nscore\n"
    generate, _, score = (tmp_path / "called").read_text().splitlines()[-3:]
    assert "--gen-subset valid --beam 4" in generate and "--max-tokens 999" in generate
    assert score == (
        f"{scripts}/score.py --hypotheses {save}/valid.hyp --references {data}/text/raw.valid.{target} "
        f"--source-lang en --target-lang {target} --json {save}/valid-score.json"
    )
    assert (save / "valid.hyp").read_text() == "a, b.\nc.\nd.\n"

    (save / "score.json").write_text("[]")
    (save / "valid-score.json").write_text("[]")
    broken = stub(tmp_path / "broken", python="", sacrebleu="", fairseq_validate="exit 1")
    mistake(example, "evaluate.sh", save, *flags, MIXTAPE_VENV=broken)  # what is there is of the average before
    assert not [name for name in files(save) if name.startswith(("test", "score", "valid-score", "valid.hyp"))]


def test_evaluation_without_an_outcome(example, tmp_path):
    """A perplexity that is no common number is kept as it is; where there is none, or no translation, a sentence."""
    data, save = tmp_path / "data", tmp_path / "save"
    (data / "text").mkdir(parents=True)
    save.mkdir()
    flags = ["evaluate.sh", save, "--data", data, "--test-set", "wmt14/full"]

    def tools(name, validate, generate):
        commands = {"fairseq_validate": f"echo '{validate}'", "fairseq_generate": f"echo '{generate}'"}
        return stub(tmp_path / name, python="", sacrebleu="", sacremoses="cat", **commands)

    no_perplexity = tools("a", "nothing", "H-0\t-1\tx")
    message = f"evaluate.sh: fairseq-validate gave no perplexity; see {save}/validate.log"
    assert mistake(example, *flags, MIXTAPE_VENV=no_perplexity) == message
    assert not (save / "test-perplexity.txt").exists()

    no_translation = tools("b", "nll_loss 60.1 | ppl 1.2357e+18 | wps 3", "nothing")
    message = f"evaluate.sh: {save}/generate.log holds no translations that could be detokenized"
    assert mistake(example, *flags, MIXTAPE_VENV=no_translation) == message
    assert (save / "test-perplexity.txt").read_text() == "test nll_loss 60.1 | ppl 1.2357e+18\n"
    assert not (save / "test.hyp").exists()
    valid = f"{data}/text/raw.valid.{EXAMPLES[example]}"
    message = f"evaluate.sh: {valid}, which --valid and --tune-lenpen score, is no file; run prepare.sh first"
    for option in (["--valid"], ["--tune-lenpen", "1"]):
        assert mistake(example, *flags, *option, MIXTAPE_VENV=no_translation) == message


# ------------------------------------------------------------------------------------------------------- mistakes


def test_mistakes(example, no_data, printing, tmp_path):
    target = EXAMPLES[example]
    assert mistake(example, "train.sh", "plif").startswith(
        "train.sh: the output layer is 'plif', allowed are softmax, mos, moc and mixtape; "
    )
    empty = tmp_path / "empty"
    empty.mkdir()
    flags = ["train.sh", "mos", "--save", tmp_path / "save"]
    message = f"train.sh: --data {empty} holds no binarized data; run prepare.sh first"
    assert mistake(example, *flags, "--data", empty) == message
    flags += ["--data", no_data]
    message = "train.sh: --gpus is '0', allowed is a positive whole number"
    assert mistake(example, *flags, "--gpus", 0) == message
    message = "train.sh: MIXTAPE_VENV is nowhere, which is no folder; scripts/setup.sh sets up all that is needed"
    assert mistake(example, *flags, MIXTAPE_VENV="nowhere") == message
    message = "train.sh: --max-tokens is 'x', allowed is a positive whole number"
    assert mistake(example, *flags, "--max-tokens", "x") == message
    message = "train.sh: --gpus is 40000, more than an update has tokens, 32768"
    assert mistake(example, *flags, "--gpus", 40_000, MIXTAPE_VENV=printing, GPUs=50_000) == message
    assert mistake(example, *flags, "--save") == "train.sh: --save needs a value; see train.sh --help"
    assert not (tmp_path / "save").exists()

    assert "--help" in mistake(example, "evaluate.sh")
    assert mistake(example, "evaluate.sh", tmp_path / "nowhere") == f"evaluate.sh: {tmp_path}/nowhere is no folder"
    flags = ["evaluate.sh", empty, "--data", no_data]
    way_out = "give the references as --references FILE"
    message = f"evaluate.sh: {no_data}/text/raw.test.{target} is no file; run prepare.sh first, or {way_out}"
    assert mistake(example, *flags) == message
    message = f"evaluate.sh: --references nowhere is no file; run prepare.sh first, or {way_out}"
    assert mistake(example, *flags, "--references", "nowhere") == message
    message = "evaluate.sh: --references and --test-set exclude each other"
    assert mistake(example, *flags, "--references", "x", "--test-set", "y") == message
    message = f"evaluate.sh: --test-set wmt0 en-{target} is not to be had from sacrebleu; {way_out}"
    assert mistake(example, *flags, "--test-set", "wmt0") == message
    message = "evaluate.sh: --max-tokens is '0', allowed is a positive whole number"
    assert mistake(example, *flags, "--max-tokens", 0) == message
    assert mistake(example, *flags, "--beam", 5) == "evaluate.sh: unknown option --beam; see evaluate.sh --help"
    (empty / "checkpoint_1_2.pt").write_bytes(b"")
    message = f"error: --last asks for 10 checkpoints, and {empty} has 1 named checkpoint_E_U.pt"
    reference = tmp_path / "reference"
    reference.write_text("a\n")
    assert mistake(example, *flags, "--references", reference).startswith(message)
    for script in ("train.sh", "evaluate.sh"):
        assert output(example, script, "--help").startswith(f"usage: {script} ")
