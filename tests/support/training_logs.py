"""Logs and score files as trainings leave them, made here, and the table that collect_results.py prints of them."""

TIME = "2026-01-02 03:04:05 | INFO | "
LAYERS = {
    "softmax": "output_layer='softmax', num_components=4",
    "mixtape": "num_components=4, output_layer='mixtape'",
    "plif": "output_layer='plif', num_components=4, plif_lr_scale=1.0, freeze_plif=False",
    "plif-frozen": "output_layer='plif', num_components=4, plif_lr_scale=1.0, freeze_plif=True",
}


def start(
    layer="mixtape", seed=7, task="translation", parameters="5,472,793", command="examples/multi30k/train.sh", bf16=True
):
    """The beginning of train.log, as train.sh and fairseq-train write it."""
    return (
        f"train.sh: commit 3be862a, on EPYC (threads: 1), command {command} {layer} --seed {seed}\n"
        f"{TIME}fairseq_cli.train | {{'common': {{'_name': None, 'seed': {seed}, 'cpu': False, 'fp16': False, "
        f"'bf16': {bf16}}}, 'dataset': "
        f"{{'fixed_validation_seed': None}}, 'model': Namespace(task='{task}', {LAYERS[layer]}, seed={seed})}}\n"
        f"{TIME}fairseq_cli.train | num. shared model params: {parameters} (num. trained: {parameters})\n"
        f"{TIME}fairseq_cli.train | num. expert model params: 0 (num. trained: 0)\n"
    )


def epoch(number, updates, ppl, wps=1000, wall=60, train_wall=440):
    """One epoch of a log, with --log-format simple."""
    inner = (
        f"loss=11.829, nll_loss=11.803, ppl=3573.49, wps={wps}, ups=0.61, wpb=1868.2, bsz=107, "
        f"num_updates={updates - 4}, lr=5e-05, gnorm=0.733, train_wall=82, wall={wall - 9}"
    )
    valid = (
        f"valid on 'valid' subset | loss 9 | nll_loss 8.5 | ppl {ppl} | wps 5412.8 | wpb 695.8 | bsz 10 | "
        f"num_updates {updates} | best_loss 8.2"
    )
    train = (
        "loss 3.926 | nll_loss 2.624 | ppl 6.17 | wps 1125.2 | ups 0.61 | wpb 1843.9 | bsz 105.8 | "
        f"num_updates {updates} | lr 0.000551485 | gnorm 0.828 | train_wall {train_wall} | wall {wall}"
    )
    return (
        f"{TIME}train_inner | epoch {number:03d}:     50 / 274 {inner}\n"
        f"{TIME}valid | epoch {number:03d} | {valid}\n"
        f"{TIME}train | epoch {number:03d} | {train}\n"
    )


DONE = f"{TIME}fairseq_cli.train | done training in 6084.6 seconds\n"
SCORES = [
    {"metric": "BLEU 13a", "score": 34.9812, "signature": "nrefs:1|tok:13a", "preprocessing": None},
    {"metric": "BLEU intl", "score": 33.5, "signature": "nrefs:1|tok:intl", "preprocessing": None},
    {"metric": "BLEU tokenized, compounds split", "score": 35.25, "signature": "tok:none", "preprocessing": "Moses"},
    {"metric": "chrF", "score": 57.96, "signature": "nc:6", "preprocessing": None},
]


def write_folder(path, **files):
    """A new folder with these files: in their names `_log` stands for `.log` and so on, and `__` for `-`."""
    path.mkdir()
    for file, content in files.items():
        content = content if isinstance(content, bytes) else content.encode()
        (
            path / file.replace("__", "-").replace("_log", ".log").replace("_txt", ".txt").replace("_json", ".json")
        ).write_bytes(content)
    return path


def table_of(printed):
    """The rows of the Markdown table as dictionaries, and what follows it."""
    lines = printed.splitlines()
    cells = [[cell.strip() for cell in line[1:-1].split(" | ")] for line in lines if line.startswith("|")]
    assert all(len(row) == len(cells[0]) for row in cells) and set(cells[1]) == {"---"}
    return [dict(zip(cells[0], row)) for row in cells[2:]], lines[len(cells) :]


def row(command, seed, name="x", layer="softmax", **values):
    """A training as collect() gives it, as far as groups need it."""
    row = {"folder": name, "training": name, "layer": layer, "seed": str(seed), "command": command, **values}
    return {"valid ppl": None, **row}
