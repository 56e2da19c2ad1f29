#!/usr/bin/env python3
"""What train.sh of the examples does with its arguments before it starts fairseq-train.

    plan_training.py --example ptb --data data-bin/ptb --layers "$layers" --options float32 -- mos --seed 3 --lr 1

Prints assignments for the shell to evaluate: $layer $data $save $seed, the flags of the layer's row, and so on. A
mistake ends in one sentence and status 1.

A recipe's layers are a table, a row for each: its name, then flags of fairseq-train. Of these are the recipe's own:
    --seed N                  the default of train.sh's --seed (1 where a row has none)
    --finetune-lr A           --lr of the second stage
    --parameters, --multiplications
                              of the model, and of a token in it, in millions: what the estimate needs
"""

import argparse
import os
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple, Union

from estimate_training import disk_space, estimate, split_update

Options = Dict[str, Union[str, bool, None]]
Variables = Dict[str, Union[str, int, bool, None, Sequence[str]]]

EVERY_RECIPE = ("data", "save", "seed", "print")
HELP = """
--gpus N        GPUs, on all nodes together (default: those that are visible; under srun, times the number of nodes)
--max-tokens N  at most as many tokens on a GPU at once (default: 4096); an update has 32,768 all the same
--bf16          bfloat16, where the GPU has it
--smoke         a model of 1/32 of the width, 10 updates on the CPU; in checkpoints/{example}.smoke.LAYER.seed1
--finetune      the second stage, after the first has ended: averaged SGD from its best weights, into DIR/finetuned
--small         smaller, for a CPU, each layer of about as many parameters; in checkpoints/{example}.small.LAYER.seed1
--long          with --small, 30 epochs and what dropouts suit them; in checkpoints/{example}.small.long.LAYER.seed1
--short         30 epochs with a linear decay and dropouts of .2; in checkpoints/{example}.short.LAYER.seed1
--float32       on the CPU, no bfloat16 even where the processor is faster in it
--data DIR      what prepare.sh wrote (default: {data})
--save DIR      checkpoints and train.log; give it with added flags (default: checkpoints/{example}.LAYER.seedN)
--seed N        default: {seeds}
--print         only print the command, complete; needs no data"""
OPTIONS = {line[2:16].split()[0]: line for line in HELP.splitlines() if line}
SMOKE = (
    1024,
    256,
    10,
    1,
    3,
)  # tokens of an update and at once; updates, every so many a checkpoint, those that are kept


class Layer(NamedTuple):
    flags: List[str]  # of fairseq-train
    settings: Dict[str, str]  # the recipe's own


# ------------------------------------------------------------------------------------------------- layers, options


def read_layers(table: str) -> Dict[str, Layer]:
    """Name -> layer of each row of a recipe's table; # begins a comment."""
    layers = {}
    for row in table.splitlines():
        name, *flags = shlex.split(row, comments=True) or [""]
        settings = {}
        for setting in ("seed", "finetune-lr", "parameters", "multiplications"):
            if f"--{setting}" in flags:
                at = flags.index(f"--{setting}")
                settings[setting] = flags[at + 1]
                del flags[at : at + 2]
        if name:
            layers[name] = Layer(flags, settings)
    return layers


def enumerate_names(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def has_value(option: str) -> bool:
    return len(OPTIONS[option][:16].split()) > 1


def parse_options(arguments: Sequence[str], names: Sequence[str]) -> Tuple[Options, List[str]]:
    """Values of the options called `names`, and what remains, which is fairseq-train's.

    An option that is not given is None; one without a value is True. Raises ValueError where a value is missing or
    empty.
    """
    values: Options = dict.fromkeys(names)
    extra, remaining = [], iter(arguments)
    for argument in remaining:
        name, equals, value = argument[2:].partition("=") if argument.startswith("--") else ("", "", "")
        if name not in names or (equals and not has_value(name)):
            extra.append(argument)
        elif not has_value(name):
            values[name] = True
        else:
            values[name] = value if equals else next(remaining, "--")
            if not equals and values[name].startswith("--"):  # the next option, not a value
                raise ValueError(f"--{name} needs a value; see train.sh --help")
            if not values[name]:
                raise ValueError(f"--{name} is empty; see train.sh --help")
    return values, extra


def positive(name: str, value: str) -> int:
    if not re.fullmatch("[1-9][0-9]*", value):
        raise ValueError(f"--{name} is '{value}', allowed is a positive whole number")
    return int(value)


def usage(recipe: argparse.Namespace) -> str:
    layers, names = read_layers(recipe.layers), (*recipe.options, *EVERY_RECIPE)
    seeds: Dict[str, List[str]] = {}
    for name, layer in layers.items():
        seeds.setdefault(layer.settings.get("seed", "1"), []).append(name)
    said = [f"{seed} for {enumerate_names(of)}" for seed, of in seeds.items()] if len(seeds) > 1 else list(seeds)
    options = [OPTIONS[name].format(data=recipe.data, example=recipe.example, seeds=", ".join(said)) for name in names]
    first = " ".join(f"[{option[:16].strip()}]" for option in options)
    first = f"usage: train.sh {'|'.join(layers)} {first} [flags of fairseq-train, which win over those here]"
    return "\n  ".join([first, *options])


# ---------------------------------------------------------------------------------------------------------- devices


def count_gpus(asked: Optional[int], on_cpu: bool, printing: bool) -> Tuple[int, str]:
    """How many devices train, and whether each is a "GPU" or a "CPU".

    As many GPUs as are asked for, else all that are visible, under srun on each node of the step; what is only printed
    may be for another machine. Raises ValueError where there are fewer, for which fairseq would wait for ever.
    """
    if on_cpu:
        if asked not in (None, 1):
            raise ValueError(f"--gpus is {asked}, and training on the CPU uses none")
        return 1, "CPU"
    if printing and asked:
        return asked, "GPU"
    visible = import_torch().cuda.device_count()
    if os.environ.get("SLURM_STEP_NODELIST"):
        visible *= int(os.environ.get("SLURM_NNODES", 1))
    if not visible:
        say("no GPU is visible, training on the CPU")
    if asked and asked > max(visible, 1):
        raise ValueError(
            f"--gpus is {asked}, more than the {visible} that are visible; those of other nodes count under srun only"
        )
    return asked or max(visible, 1), "GPU" if visible else "CPU"


def import_torch() -> ModuleType:
    """torch, which takes seconds and is not always needed. Raises ValueError where there is none."""
    try:
        import torch
    except ImportError:
        raise ValueError("torch is not installed; scripts/setup.sh sets up all that is needed") from None
    return torch


def check_bf16() -> None:
    """Raises ValueError where the GPU has no bfloat16, before fairseq finds out on the way."""
    torch = import_torch()
    if torch.cuda.is_available() and torch.version.hip is None and torch.cuda.get_device_capability()[0] < 8:
        raise ValueError("--bf16 is not for this GPU, which has no bfloat16; use fairseq-train's --fp16")


def multiplies_faster_in_bfloat16(cpuinfo: str) -> bool:
    """Whether the processor that the file `cpuinfo` describes does; where there is no file, no.

    AMX does, and AVX-512 on AMD. On Intel without AMX, which virtual machines hide, AVX-512 multiplies matrices half as
    fast in bfloat16 as in float32 (Xeon, family 6, model 207).
    """
    try:
        processor = Path(cpuinfo).read_text()
    except OSError:
        return False
    instructions = r"\bamx_bf16\b" if "GenuineIntel" in processor else r"\b(avx512_bf16|amx_bf16)\b"
    return bool(re.search(instructions, processor))


class Run(NamedTuple):
    command: str  # train.sh's, as it was typed
    bf16: Optional[bool]


def last_run(save: str) -> Run:
    """The run that saved the last checkpoint in `save`, as its log says; what it does not say is "" and None."""
    log, started, saved = Path(save, "train.log"), Run("", None), Run("", None)
    if Path(save, "checkpoint_last.pt").is_file() and log.is_file():
        with open(log, encoding="utf-8", errors="surrogateescape") as lines:
            for line in lines:
                settings = re.search("'bf16': (True|False)", line)
                if "train.sh: commit " in line:
                    started = Run(line.rpartition("train.sh: commit ")[2].partition(", command ")[2].rstrip("\n"), None)
                elif settings:
                    started = started._replace(bf16=settings[1] == "True")
                elif "Saved checkpoint" in line:
                    saved = started
    return saved


def cpu_precision(on_cpu: bool, float32: bool, save: str) -> Variables:
    """Of a training on the CPU: bfloat16 where the processor multiplies faster in it. Nothing where there is a GPU.

    A training that has begun keeps its precision anywhere, without which fairseq does not go on with it; raises
    ValueError where that is not the one that is asked for.
    """
    began = last_run(save).bf16
    if began and float32:
        raise ValueError(f"--float32 is not for {save}, which was begun in bfloat16; choose another --save")
    on_cpu = on_cpu or not import_torch().cuda.is_available()
    # Memory of a step is kept for the next one instead of given back to the system.
    memory = {"export MALLOC_MMAP_THRESHOLD_": 4 << 30, "export MALLOC_TRIM_THRESHOLD_": 8 << 30} if on_cpu else {}
    if began is None:
        cpuinfo = os.environ.get("MIXTAPE_CPUINFO", "/proc/cpuinfo")
        began = on_cpu and not float32 and multiplies_faster_in_bfloat16(cpuinfo)
    if began and on_cpu:
        say("on the CPU, in bfloat16, which it multiplies faster; --float32 turns it off")
    return {"precision": ["--bf16"] if began else [], **memory}


# ------------------------------------------------------------------------------------------ whose folder it is

# Options that say where and how fast to train, or that the default folder has in its name; and such flags
INCIDENTAL = ("save", "seed", "print", "gpus", "max-tokens", "float32", "finetune")
INCIDENTAL_FLAGS = re.compile("cpu$|num-workers$|distributed-|ddp-|device-id$|log-|no-progress-bar$")


def meaning(recipe: argparse.Namespace, arguments: Sequence[str]) -> Dict[str, List[str]]:
    """What train.sh's arguments say of the training itself: each option's and flag's words, the last ones given."""
    options, extra = parse_options(arguments[1:], (*recipe.options, *EVERY_RECIPE))
    options["data"] = options["data"] or recipe.data
    meant = {name: [str(value)] for name, value in options.items() if value and name not in INCIDENTAL}
    words: List[str] = []
    for word in extra:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            words = [value] if equals else []
            if not INCIDENTAL_FLAGS.match(name):
                meant[name] = words
        else:
            words.append(word)
    return meant


def check_folder(recipe: argparse.Namespace, arguments: Sequence[str], save: str, second: bool) -> None:
    """Raises ValueError where `save`, a default, has a training of another meaning, which would go on as this one.

    The second stage takes the first one's weights, but has a rate and an averaging of its own. A command that cannot be
    read, since the log has none or one with what only bash reads, $'...', is let pass.
    """
    asked = meaning(recipe, arguments)
    folders = {save: ("lr", "averaging-epoch"), f"{save}/finetuned": ()} if second else {save: ()}
    for folder, of_its_own in folders.items():
        command = last_run(folder).command
        if not command or "$'" in command:
            continue
        try:
            begun = meaning(recipe, shlex.split(command)[1:])
        except ValueError:
            continue
        if any(begun.get(name) != asked.get(name) for name in {*begun, *asked}.difference(of_its_own)):
            raise ValueError(
                f"{folder} has a training by another command, {command}: choose another --save for this one, "
                f"or give --save {save} to go on with that one"
            )


# -------------------------------------------------------------------------------------------------------- the whole


def say(sentence: str) -> None:
    print(f"train.sh: {sentence}", file=sys.stderr, flush=True)


def plan_update(recipe: argparse.Namespace, options: Options, name: str, layer: Layer, save: str) -> Variables:
    """How an update of `recipe.update_tokens` is spread, and a word on what the training needs."""
    most = positive("max-tokens", options["max-tokens"] or "4096")
    gpus = options["gpus"] and positive("gpus", options["gpus"])
    on_cpu, printing = bool(options["cpu"]), bool(options["print"])
    tokens, updates, interval, kept = recipe.update_tokens, recipe.updates, recipe.save_interval, recipe.keep
    if options["smoke"]:
        tokens, most, updates, interval, kept = SMOKE
    gpus, device = count_gpus(gpus, on_cpu, printing)
    if options["bf16"] and not on_cpu and not printing:
        check_bf16()
    update_freq, max_tokens = split_update(tokens, gpus, most)

    first_task = os.environ.get("SLURM_PROCID", "0") == "0"
    if first_task and not options["smoke"] and "parameters" in layer.settings:
        sizes = (float(layer.settings[size]) for size in ("parameters", "multiplications"))
        split = (gpus, update_freq, max_tokens, device, bool(options["bf16"]))
        checkpoints = kept + 2  # checkpoint_last.pt and checkpoint_best.pt
        for sentence in estimate(name, *sizes, updates, *split, checkpoints, save, *disk_space(save)):
            say(sentence)
    return {
        "gpus": gpus, "max_tokens": max_tokens, "update_freq": update_freq, "updates": updates, "interval": interval,
        "kept": kept, "precision": ["--bf16"] if options["bf16"] else [],
    }  # fmt: skip


def second_stage(name: str, layer: Layer, first: str, printing: bool) -> List[str]:
    """Flags of the layer's second stage, from the best weights of the first. Raises ValueError where there are none."""
    best = f"{first}/checkpoint_best.pt"
    if not printing and not os.path.isfile(best):
        raise ValueError(f"{first} holds no checkpoint_best.pt; run train.sh {name} without --finetune first")
    flags = list(layer.flags)
    flags[flags.index("--lr") + 1] = layer.settings["finetune-lr"]
    return [*flags, "--finetune-from-model", best, "--averaging-epoch", "0", "--stop-when-nonmonotone"]


def plan(recipe: argparse.Namespace, arguments: Sequence[str]) -> Variables:
    """Shell variables out of train.sh's arguments: its options, and what follows from them. Raises ValueError."""
    layers = read_layers(recipe.small_layers if "--small" in arguments and recipe.small_layers else recipe.layers)
    name = arguments[0] if arguments else ""
    if name not in layers:
        raise ValueError(f"the output layer is '{name}', allowed are {enumerate_names(layers)}; see train.sh --help")
    layer = layers[name]
    options, extra = parse_options(arguments[1:], (*recipe.options, *EVERY_RECIPE))
    if any(argument.split("=")[0] == "--save-dir" for argument in extra):
        raise ValueError("--save-dir is not allowed, since train.log would stay behind: give --save")
    if options.get("small") and options.get("finetune"):
        raise ValueError("--small has no second stage")
    if options.get("long") and not options.get("small"):
        raise ValueError("--long goes with --small: the recipe of the papers is long enough")
    if options.get("smoke") and options.get("max-tokens"):
        raise ValueError(f"--max-tokens {options['max-tokens']} does not go with --smoke, whose updates are small ones")
    if options.get("float32") and "--bf16" in extra:
        raise ValueError("--float32 and --bf16 exclude each other")
    data, seed = options["data"] or recipe.data, options["seed"] or layer.settings.get("seed", "1")
    example = ".".join([recipe.example, *(name for name in ("small", "long", "short", "smoke") if options.get(name))])
    save = options["save"] or f"checkpoints/{example}.{name}.seed{seed}"
    if not options["print"] and not any(Path(data).glob(recipe.dictionary)):
        raise ValueError(f"--data {data} holds no binarized data; run prepare.sh first")

    if ":" in save:
        raise ValueError(f"--save {save} has a colon, at which fairseq-generate takes paths apart: choose another one")

    variables = {**options, "layer": name, "layer_flags": layer.flags, "data": data, "save": save, "seed": seed}
    variables.update({"precision": [], "extra": extra})
    options["cpu"] = bool(options.get("smoke")) or "--cpu" in extra
    if options.get("finetune"):
        variables["layer_flags"] = second_stage(name, layer, save, bool(options["print"]))
        variables["save"] = f"{save}/finetuned"
    if recipe.updates:
        variables.update(plan_update(recipe, options, name, layer, save))
    if "float32" in recipe.options and not {"--fp16", "--memory-efficient-fp16", "--amp"} & {*extra}:
        variables.update(cpu_precision(bool(options["cpu"]), bool(options["float32"]), variables["save"]))
    if not options["save"] and not options["print"]:
        check_folder(recipe, arguments, save, bool(options.get("finetune")))
    return variables


def assignments(variables: Variables) -> str:
    """Shell code that sets the variables: lists are arrays, None and False empty, True 1."""
    lines = []
    for name, value in variables.items():
        if isinstance(value, (list, tuple)):
            quoted = f"({' '.join(map(shlex.quote, value))})"
        else:
            quoted = shlex.quote("" if value in (None, False) else "1" if value is True else str(value))
        lines.append(f"{name.replace('-', '_')}={quoted}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--example", required=True, help="its folder")
    parser.add_argument("--data", required=True, help="the default of --data")
    parser.add_argument("--dictionary", default="dict.txt", help="which files in --data show that it is whole")
    parser.add_argument("--options", type=str.split, default=[], help="of train.sh, beside those that every recipe has")
    parser.add_argument("--layers", required=True, help="a row for each")
    parser.add_argument("--small-layers", help="the same with --small")
    parser.add_argument("--updates", type=int, help="where the recipe spreads an update over GPUs")
    parser.add_argument("--update-tokens", type=int, help="of all GPUs together")
    parser.add_argument("--save-interval", type=int, help="updates between checkpoints")
    parser.add_argument("--keep", type=int, help="checkpoints, the last ones")
    at = sys.argv.index("--")
    recipe, arguments = parser.parse_args(sys.argv[1:at]), sys.argv[at + 1 :]
    if "-h" in arguments or "--help" in arguments:
        print(f"printf '%s\\n' {shlex.quote(usage(recipe))}\nexit")
        return
    try:
        print(assignments(plan(recipe, arguments)))
    except ValueError as error:
        sys.exit(f"train.sh: {error}")


if __name__ == "__main__":
    main()
