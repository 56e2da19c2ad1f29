"""What trainings reached, out of the files that examples/*/train.sh and evaluate.sh leave in their folders."""

from __future__ import annotations

import json
import math
import re
import shlex
import statistics
from pathlib import Path
from typing import Iterable, Iterator, Sequence

from mixtape_plugin.errors import UserError
from mixtape_plugin.files import read_csv
from mixtape_plugin.output_layers import OUTPUT_LAYERS, OutputLayer
from mixtape_plugin.tables import table

NOT_RUN, UNREADABLE, UNKNOWN = "not run", "unreadable", "unknown"
NUMBER = r"([-+]?\d[\d.]*(?:e[-+]?\d+)?|inf|nan)"

COMMON = ("training", "layer", "seed", "updates", "epochs", "ended", "parameters", "train ppl", "valid ppl", "test ppl")
BITS = ("train bits/character", "valid bits/character", "test bits/character")
LANGUAGE_MODEL = ("cache pointer", "dynamic evaluation")
TRANSLATION = ("BLEU 13a", "BLEU intl", "BLEU 13a lower-cased", "BLEU tokenized", "chrF")
DIALOG = "BLEU-1 precision"  # of scripts/score_dialog.py, among others
CURVE = "validation by updates"
SHOWN = {"wall s": "wall time"}  # columns that a table calls by another name
RUN = ("tokens/s", "s an epoch", "wall s", "precision", "hardware", "commit")
# What scripts/analyze.py and evaluate.sh --tune-lenpen leave in a training's folder; under "columns" what are columns.
# $analyses in examples/lib/evaluation.sh are those of the former.
ANALYSES = ("rank.json", "predictions.json", "similarity.json", "lenpen.json")

# File of a training's folder -> what it holds under which name; the last that evaluate.sh wrote counts.
TEXTS = {
    "valid.txt": {"valid ppl": rf"perplexity {NUMBER}\n", "valid bits/character": rf"{NUMBER} bits a character"},
    "test.txt": {"test ppl": rf"perplexity {NUMBER}\n", "test bits/character": rf"{NUMBER} bits a character"},
    "test-perplexity.txt": {"test ppl": rf"\bppl {NUMBER}(?= \||\n)"},
    "cache_pointer.txt": {"cache pointer": rf"perplexity with cache {NUMBER}\b"},
    "dynamic_evaluation.txt": {"dynamic evaluation": rf"dynamic perplexity {NUMBER}\b"},
}
SCORES = {"score.json": "", "valid-score.json": "valid "}  # -> what is put before the metrics' names
LAST_UPDATES = 4000  # over which Yang et al. 2018 average the train perplexity on One Billion Word
# By which flag of fairseq-train; without them it is float32.
PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float16 autocast": "amp"}
START = "train.sh: commit "  # begins the line that train.sh writes before each start of fairseq-train
CONFIGURATION = r"[-\d]+ [:\d]+ \| INFO \| fairseq_cli\.train \| \{"  # begins what fairseq-train says first
ANEW = r"No existing checkpoint found|Loaded checkpoint .* @ 0 updates\)"  # what it says where it resumes nothing


def log_records(text: str) -> Iterator[tuple]:
    """The lines with numbers of fairseq-train's log, ``--log-format simple`` or ``json``.

    Yields:
        ``train_inner``, ``train`` or ``valid``, and a dictionary of floats with ``epoch`` among them. Of a line that is
        cut off or that another one runs into, nothing: its last number may be half of one.
    """
    for line in text.splitlines(keepends=True):
        found = re.match(r"[-\d]+ [:\d]+ \| INFO \| (train_inner|train|valid) \| (.*)\n", line)
        if not found or " | INFO | " in found[2]:
            continue
        name, body = found[1], found[2]
        if body.startswith("{"):
            try:
                values = json.loads(body)
            except ValueError:
                continue
            pairs = [(key[len(name) + 1 :] if key.startswith(f"{name}_") else key, v) for key, v in values.items()]
        else:
            epoch = re.match(r"epoch (\d+)", body)
            pairs = re.findall(rf"(?<![\w'])(\w+)[= ]{NUMBER}(?=, | \||$)", body)
            pairs = [*pairs, ("epoch", epoch[1])] if epoch else pairs
        try:
            yield name, {key: float(value) for key, value in pairs}
        except (TypeError, ValueError):
            continue


def validation_curve(records: Iterable[tuple]) -> dict:
    """Updates -> perplexity of the validation text, as far as the log of a training goes; {} where there is none."""
    return {
        int(r["num_updates"]): r["ppl"] for name, r in records if name == "valid" and {"num_updates", "ppl"} <= {*r}
    }


def read(path: Path) -> str | None:
    """A file's text, whatever bytes are in it, or None where it does not exist."""
    if not path.exists():
        return None
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None


def last(pattern: str, text: str) -> str | None:
    found = re.findall(pattern, text)
    return found[-1] if found else None


def train_perplexity(records: Iterable[tuple], several_shards: bool) -> float | None:
    """Perplexity in training, with dropout, as fairseq logs it: of the epoch of the best validation.

    Of a training on several shards, whose epochs are one shard each, of the last 4,000 updates: the geometric mean of
    what was logged, the same as of their mean loss where lines are of equally many tokens.
    """
    if several_shards:
        inner = [r for name, r in records if name == "train_inner" and {"ppl", "num_updates"} <= {*r}]
        last_update = max((r["num_updates"] for r in inner), default=0)
        kept = [r["ppl"] for r in inner if r["num_updates"] > last_update - LAST_UPDATES]
        return statistics.geometric_mean(kept) if kept else None
    valid = [(r["ppl"], r["epoch"]) for name, r in records if name == "valid" and {"ppl", "epoch"} <= {*r}]
    valid = [(ppl, epoch) for ppl, epoch in valid if not math.isnan(ppl)]  # which min() would keep where it comes first
    train = {r["epoch"]: r["ppl"] for name, r in records if name == "train" and {"ppl", "epoch"} <= {*r}}
    best = min((v for v in valid if v[1] in train), default=None)
    return train[best[1]] if best else None


def starts_of(text: str) -> list[str]:
    """What each start of fairseq-train wrote into a log, from train.sh's line on or, without that, from the
    configuration; but for starts that trained nothing, such as refused commands, unless no other is there, and for
    those before a training that began anew, whose checkpoints were taken away."""
    starts = []
    for part in re.split(f"(?={re.escape(START)}|{CONFIGURATION})", text):
        if starts and starts[-1].startswith(START) and not re.search(CONFIGURATION, starts[-1]):
            starts[-1] += part
        else:
            starts.append(part)
    trained = [start for start in starts if "done training in " in start or next(log_records(start), None)]
    first = max((n for n, start in enumerate(trained) if re.search(ANEW, start)), default=0)
    return trained[first:] or starts


def from_log(text: str) -> dict:
    """The columns that train.log has. A training that was resumed is one, whose last start counts."""
    parts = starts_of(text)
    text = "".join(parts)
    row = {"ended": "yes" if re.search(r"done training in [\d.]+ seconds\n\Z", text) else "no"}
    config = {
        "layer": r"output_layer='([\w-]+)'",
        "seed": r"'seed': (\d+)",
        "parameters": r"num\. shared model params: ([\d,]+) ",
        "task": r"task='(\w+)'",
    }
    row.update((name, last(pattern, text)) for name, pattern in config.items())
    if last(r"arch='(\w+)'", text) == "dialog_seq2seq":  # its task is translation, its scores are others
        row["task"] = "dialog"
    if row["parameters"]:
        row["parameters"] = int(row["parameters"].replace(",", ""))
    components = last(r"num_components=(\d+)", text)
    layer_class = OUTPUT_LAYERS.get(row["layer"], OutputLayer)
    if components and layer_class.has_components:
        row["layer"] += f"-{components}"
    else:  # seeds of plif and of plif-frozen are two groups
        for variant, options in layer_class.variants.items():
            if all(last(rf"\b{name}=([^,)]+)", text) == str(value) for name, value in options.items()):
                row["layer"] += f"-{variant}"
    starts = re.findall(re.escape(START) + r"(\S+), (?:on (.*?), )?command (.*)", text)
    row["commit"] = ", ".join(dict.fromkeys(commit for commit, _, _ in starts)) or UNKNOWN
    row["hardware"] = "; ".join(dict.fromkeys(filter(None, (hardware for _, hardware, _ in starts)))) or UNKNOWN
    row["command"] = starts[-1][2].strip() if starts else UNKNOWN
    flags = {name: last(rf"'{flag}': (True|False)", text) for name, flag in PRECISIONS.items()}
    row["precision"] = next(
        (name for name, given in flags.items() if given == "True"), "float32" if any(flags.values()) else None
    )

    records = list(log_records(text))

    def values(key, *names, of=records):
        return [record[key] for name, record in of if name in names and key in record]

    row["updates"] = max(map(int, values("num_updates", "train_inner", "train", "valid")), default=None)
    row["epochs"] = max(map(int, values("epoch", "train")), default=None)  # those that were trained whole
    row["valid ppl"] = min(values("ppl", "valid"), key=lambda ppl: (math.isnan(ppl), ppl), default=None)
    row["curve"] = validation_curve(records)
    row["train ppl"] = train_perplexity(records, ":" in (last(r"[( ]data='([^']*)'", text) or ""))
    speeds = values("wps", "train_inner") or values("wps", "train")
    row["tokens/s"] = statistics.median(speeds) if speeds else None
    epochs = values("train_wall", "train")  # without validation and saving
    row["s an epoch"] = statistics.median(epochs) if epochs else None
    walls = [values("wall", "train_inner", "train", of=log_records(part)) for part in parts]
    row["wall s"] = sum(max(wall) for wall in walls if wall) or None  # fairseq's clock begins anew with each start
    return row


def collect(folder: str | Path) -> tuple:
    """All that is known of a training.

    Args:
        folder: ``train.log`` and what evaluate.sh writes (:data:`TEXTS`, :data:`SCORES`), as far as they exist.

    Returns:
        a dictionary from columns to values, None for what was not run and :data:`UNREADABLE` for what a file should
        have and has not; for each score also ``… signature``; sentences about files that are damaged.

    Raises:
        UserError: the folder does not exist, or holds none of these files.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder: give those that train.sh wrote")
    texts = {name: read(folder / name) for name in ("train.log", *SCORES, *TEXTS)}
    if all(text is None for text in texts.values()):
        raise UserError(f"{folder} holds neither train.log nor scores: give the folders that train.sh wrote")

    row, damaged = {"folder": str(folder), "training": folder.resolve().name, **from_log(texts["train.log"] or "")}, []
    if texts["train.log"] is None or not row["parameters"]:
        row["ended"] = None
        damaged.append(
            f"{folder}/train.log {'is missing' if texts['train.log'] is None else 'does not tell the model'}"
        )
    for name, patterns in TEXTS.items():
        if texts[name] is None:
            continue
        found = {column: last(pattern, texts[name]) for column, pattern in patterns.items()}
        row.update((column, float(value)) for column, value in found.items() if value)
        column = next(iter(patterns))
        if not found[column]:
            row[column] = UNREADABLE
            damaged.append(f"{folder}/{name} holds no perplexity")
    for name, prefix in SCORES.items():
        if texts[name] is None:
            continue
        try:
            scores = json.loads(texts[name])
            if not isinstance(scores, list) or not scores:
                raise ValueError
            for score in scores:
                row[prefix + score["metric"]] = float(score["score"])
                row[f"{prefix}{score['metric']} signature"] = "; ".join(
                    filter(None, [score["signature"], score["preprocessing"] and f"after {score['preprocessing']}"])
                )
        except (ValueError, TypeError, KeyError):
            columns = [DIALOG] if row["task"] == "dialog" else TRANSLATION
            row.update((prefix + column, UNREADABLE) for column in columns)
            damaged.append(f"{folder}/{name} is no list of scores")
    if any(isinstance(row.get(name), float) for name in BITS) and row["train ppl"]:
        row["train bits/character"] = math.log2(row["train ppl"])
    for name in ANALYSES:
        found = read(folder / name)
        if found is None:
            continue
        try:
            columns = {str(column): value for column, value in json.loads(found)["columns"].items()}
            if not all(isinstance(value, (int, float)) for value in columns.values()):
                raise ValueError
            row["analyses"] = {**row.get("analyses", {}), **columns}
            row.update(columns)
        except (ValueError, TypeError, KeyError, AttributeError):
            damaged.append(f"{folder}/{name} holds no figures")
    return row, damaged


def read_rows(path: str | Path) -> list:
    """The rows of a CSV file that collect_results.py wrote, as :func:`collect` gave them.

    Raises:
        UserError: the file cannot be read, is no UTF-8, or is none of those.
    """
    if not Path(path).exists():
        raise UserError(f"{path} does not exist: give a folder that train.sh wrote, or a table of --csv")
    later = {"precision", "hardware"}  # columns that earlier tables lack
    names = {"folder", *COMMON, *RUN, "command", CURVE} - later
    lines = read_csv(path, names, "is no table of trainings: give one that collect_results.py --csv wrote")
    known = {*COMMON, *BITS, *LANGUAGE_MODEL, *TRANSLATION, *RUN, "folder", "command", CURVE}
    rows = []
    for line in lines:
        row = {name: value_of(text) for name, text in line.items()}
        row["seed"] = None if row["seed"] is None else str(row["seed"])
        row.update({name: line[name] for name in ("folder", "training", "commit", "command")})  # of digits, perhaps
        points = (point.split(":") for point in (line[CURVE] or "").split() if ":" in point)
        try:
            row["curve"] = {int(updates): float(perplexity) for updates, perplexity in points}
        except ValueError:
            raise UserError(f"{path}: {CURVE!r} of {line['folder']} is no list of UPDATES:PERPLEXITY") from None
        signatures = {name for name in row if name.endswith(" signature")}
        scores = {name[: -len(" signature")] for name in signatures}
        others = known | scores | signatures
        own = {name: row[name] for name in line if name not in others and row[name] not in (None, UNREADABLE)}
        if own:  # of analyses, or somebody's notes
            row["analyses"] = own
        rows.append({name: value for name, value in row.items() if value is not None or name not in signatures})
    return rows


def value_of(text: str) -> int | float | str | None:
    """A cell of a CSV file: None for what was not run, a number, or the text itself."""
    if text in (NOT_RUN, "", None):
        return None
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def words_of(command: str) -> list:
    """As a shell reads them; of a command that is damaged, what lies between blanks."""
    try:
        return shlex.split(command)
    except ValueError:
        return command.split()


def value_of_flag(command: str, name: str) -> str | None:
    """What a command gives ``--name``, the last time; "yes" where that is nothing, None where it does not have it."""
    words, given = [*words_of(command), "--"], None
    for word, following in zip(words, words[1:]):
        flag, equals, value = word.partition("=")
        if flag == f"--{name}":
            given = value if equals else "yes" if following.startswith("--") else following
    return given


def columns_of(rows: Sequence[dict]) -> list:
    """The columns of a table of these rows: those of translation, of dialog, of language models, or several of them."""
    scores = [name for row in rows for name in row if f"{name} signature" in row or row[name] == UNREADABLE]
    dialog = [row for row in rows if DIALOG in row or row.get("task") == "dialog"]
    translation = [
        row
        for row in rows
        if any(name in row for name in TRANSLATION) or (row.get("task") == "translation" and row not in dialog)
    ]
    columns = [*COMMON]
    if any(name in row for row in rows for name in BITS):
        columns += BITS
    # a table of a CSV file has every column in every row
    measured = any(row.get(name) is not None for row in rows for name in LANGUAGE_MODEL)
    if measured or len(translation) + len(dialog) < len(rows):
        columns += LANGUAGE_MODEL
    if dialog:
        columns += dict.fromkeys([DIALOG, *(name for name in scores if name.startswith("BLEU-"))])
    if translation:
        others = (name for name in scores if name != TRANSLATION[-1] and name not in columns)
        bleu = dict.fromkeys([*TRANSLATION[:-1], *others])
        columns += [*bleu, TRANSLATION[-1]]
    return [*columns, *dict.fromkeys(name for row in rows for name in row.get("analyses", ())), *RUN]


def cell(column: str, value: object) -> str:
    """A value as the Markdown table has it."""
    if value is None:
        return NOT_RUN
    if not isinstance(value, (int, float)):
        return str(value)
    if column == "wall s":
        hours, minutes = divmod(round(value / 60), 60)
        return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min" if minutes else f"{value:.0f} s"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.{digits(column)}f}"


def digits(column: str) -> int:
    """How many decimals a column's values have."""
    if column.endswith("/character"):
        return 4
    if column.startswith("BLEU-"):  # of dialog, from 0 to 1
        return 3
    return {"tokens/s": 0, "s an epoch": 0, "KLD": 3, "similarity": 3}.get(column, 2)


def markdown(rows: Sequence[dict], columns: Sequence[str] | None = None) -> str:
    """A table with a line for each training, and the signatures of its scores; all columns unless some are given."""
    columns = columns or columns_of(rows)
    names = [SHOWN.get(column, column) for column in columns]
    text = table(names, ([cell(column, row.get(column)) for column in columns] for row in rows))
    return text + signatures(rows, columns)


def signatures(rows: Sequence[dict], columns: Sequence[str]) -> str:
    """A list of the signatures of the scores in these columns; where one has several, with the folders of each."""
    notes = {}  # columns, by what is said of them
    for column in columns:
        of_signature = {}
        for row in rows:
            if f"{column} signature" in row:
                of_signature.setdefault(row[f"{column} signature"], []).append(row["folder"])
        for signature, folders in of_signature.items():
            where = f" ({', '.join(folders)})" if len(of_signature) > 1 else ""
            notes.setdefault(f"{where}: `{signature}`\n", []).append(column)
    return "\n" * bool(notes) + "".join(f"- {', '.join(names)}{said}" for said, names in notes.items())


def csv_columns(rows: Sequence[dict]) -> list:
    """Those of the table, and the folder, the command and the signatures."""
    columns = columns_of(rows)
    signatures = [f"{column} signature" for column in columns if any(f"{column} signature" in row for row in rows)]
    return ["folder", *columns, "command", CURVE, *signatures]


def csv_row(row: dict) -> dict:
    """What a CSV file has in :func:`csv_columns`; the curve as "updates:perplexity" with spaces between."""
    cells = {name: NOT_RUN if value is None else value for name, value in row.items()}
    return {**cells, CURVE: " ".join(f"{updates}:{value:g}" for updates, value in row["curve"].items())}
