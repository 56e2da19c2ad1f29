"""examples/switchboard: dialogs to pairs by hand and on the real files; prepare.sh, train.sh and evaluate.sh on dialogs
made here."""

import gzip
import hashlib
import json
import os
import random
import re
import shutil
import sys
from functools import partial

import conftest
import pytest
import recipes
from real_data import real_path
from recipes import ROOT, files, lines, load_script

from mixtape_plugin.errors import UserError
from mixtape_plugin.evaluation.dialog_bleu import corpus_bleu
from mixtape_plugin.models import dialog_seq2seq

run, output, mistake = (partial(function, "switchboard") for function in (recipes.run, recipes.output, recipes.mistake))
prepare_dialog, score_dialog = load_script("prepare_dialog"), load_script("score_dialog")
SIZES = {"train": 40, "valid": 5, "test": 6}
TINY = """
    --embed-dim 8 --utterance-hidden-size 8 --context-hidden-size 8 --decoder-hidden-size 8 --max-epoch 2 --lr 0.01
    --log-interval 5 --num-workers 0
""".split()


def write_dialogs(path, dialogs, compress=False):
    text = "".join(json.dumps({"topic": "x", "utts": utterances}) + "\n" for utterances in dialogs)
    if compress:
        with gzip.open(f"{path}.gz", "wt", encoding="utf-8") as file:
            file.write(text)
    else:
        path.write_text(text, encoding="utf-8")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Two speakers who count: an utterance says, 1 to 5 times, the number after the last one's, or now and then any."""
    folder, rng = tmp_path_factory.mktemp("corpus"), random.Random(1)
    names = "zero one two three four five six seven eight nine uh-huh it's".split()
    for split, size in SIZES.items():
        dialogs = []
        for _ in range(size):
            number, dialog = 0, []
            for _ in range(rng.randint(4, 14)):
                number = rng.randrange(12) if rng.random() < 0.1 else (number + 1) % 12
                said = [names[number]] * rng.randint(1, 5)
                dialog.append([rng.choice("AB"), " ".join(said).title(), ["act", None]])
            dialogs.append(dialog)
        write_dialogs(folder / f"{split}.jsonl", dialogs, compress=split == "train")
    return folder


@pytest.fixture(scope="module")
def prepared(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("prepared") / "switchboard"
    done = run("prepare.sh", "--from", corpus, "--out", out, "--types", 18, "--workers", 1)
    assert done.returncode == 0, done.stderr
    assert "prepare.sh: not the original: " in done.stderr
    assert f"{out} is ready: dictionary of 18 entries; train " in done.stdout
    return out


# ------------------------------------------------------------------------------------------------------ the pairs


def test_pairs_by_hand():
    said = [["A", "Uh-huh, it's"], ["B", "yes"], ["B", "NO"], ["A", "e " * 50]]
    dialog = [(speaker, prepare_dialog.words(text)) for speaker, text in said]
    found = [(" ".join(context), " ".join(response)) for context, response in prepare_dialog.pairs(dialog)]
    assert found == [
        ("<other> <d>", "uh - huh , it ' s"),
        ("<other> <d> <other> uh - huh , it ' s", "yes"),
        ("<other> <d> <other> uh - huh , it ' s <me> yes", "no"),
    ]  # the last utterance is no response
    assert dialog[3][1] == ["e"] * 38

    long = [(speaker, [str(n)]) for n, speaker in enumerate("ABBABAABBABA")]
    context, response = list(prepare_dialog.pairs(long))[-1]
    assert response == ["10"] and long[10][0] == "B"
    marks = {"A": "<other>", "B": "<me>"}
    assert context == [word for n in range(1, 10) for word in (marks[long[n][0]], str(n))]  # 9 entries: <d>, 0 are out


def test_marks_are_those_of_the_model():
    assert (prepare_dialog.ME, prepare_dialog.OTHER) == (dialog_seq2seq.ME, dialog_seq2seq.OTHER)


@pytest.mark.parametrize("split, pairs, tokens", [("valid", 5165, 69981), ("test", 5481, 76198)])
def test_counts_of_the_real_files(split, pairs, tokens, tmp_path):
    path = tmp_path / f"{split}.jsonl"
    path.write_bytes(gzip.open(real_path(f"switchboard/{split}.jsonl.gz")).read())
    found = [pair for dialog in prepare_dialog.read_dialogs(path) for pair in prepare_dialog.pairs(dialog)]
    assert len(found) == pairs
    assert sum(len(response) + 1 for _, response in found) == tokens  # with </s>
    starts = {"valid": "9c321920c918938b5feb57131b646156853cd7e4", "test": "67407f35fd1a4ae084509ab6daa5e708fc077629"}
    prepare_dialog.check(path, starts[split])
    with open(path, "ab") as file:
        file.write(b"\n")
    with pytest.raises(ValueError, match=f"{split}.jsonl is not the original: its git blob id is"):
        prepare_dialog.check(path, starts[split])


def test_dictionary_by_hand(tmp_path):
    path = tmp_path / "train.jsonl"
    write_dialogs(path, [[["A", "b b a"], ["B", "c a"]], [["A", "d b"]]])  # the last utterance counts, nothing twice
    found = prepare_dialog.dictionary(path, 4 + 3 + 3)
    assert found == [("b", 3), ("a", 2), ("c", 1), ("<me>", 0), ("<other>", 0), ("<d>", 0)]
    with pytest.raises(ValueError, match="--types is 7, allowed is 8 or more"):
        prepare_dialog.dictionary(path, 7)


DAMAGED = [
    "[" * 100_000,
    "{",
    "[]",
    "{}",
    '{"utts": []}',
    '{"utts": [["A"]]}',
    '{"utts": [["A", 3]]}',
    '{"utts": [[1, "a"]]}',
    "\xff",
]


@pytest.mark.parametrize("damage", DAMAGED, ids=lambda damage: damage[:30])
def test_damaged_line_is_named(damage, tmp_path):
    path = tmp_path / "valid.jsonl"
    good = '{"utts": [["A", "a"], ["B", "b"]]}\n'
    path.write_bytes((good * 2 + damage + "\n" + good).encode("latin-1"))
    problem = "is not UTF-8 text: invalid start byte" if damage == "\xff" else "is no dialog: wanted is"
    with pytest.raises(ValueError, match=re.escape(f"{path}, line 3 {problem}")):
        list(prepare_dialog.read_dialogs(path))


# -------------------------------------------------------------------------------------------------------- prepare.sh


def test_prepare(prepared):
    text = prepared / "text"
    for split in SIZES:
        contexts, responses = lines(text / f"{split}.context"), lines(text / f"{split}.response")
        dialogs = [json.loads(line)["utts"] for line in lines(text / f"{split}.jsonl")]
        assert len(dialogs) == SIZES[split]
        assert len(contexts) == len(responses) == sum(len(utterances) - 1 for utterances in dialogs)
        assert all(re.match("<(me|other)> ", context) for context in contexts)
        assert sum(context == "<other> <d>" for context in contexts) == len(dialogs)
    words = [line.split() for line in lines(prepared / "dict.response.txt")]
    assert len(words) + 4 == 18 and words[-3:] == [["<me>", "0"], ["<other>", "0"], ["<d>", "0"]]
    counts = [int(count) for _, count in words]
    assert counts == sorted(counts, reverse=True)
    assert (prepared / "dict.context.txt").read_bytes() == (prepared / "dict.response.txt").read_bytes()
    assert not [name for name in files(prepared) if name.endswith(".part") or name.startswith("binarizing")]


def test_prepare_again_changes_nothing(prepared, corpus):
    before = {path: path.stat().st_mtime_ns for path in prepared.rglob("*") if path.is_file()}
    output("prepare.sh", "--from", corpus, "--out", prepared, "--types", 18, "--workers", 1)
    assert {path: path.stat().st_mtime_ns for path in prepared.rglob("*") if path.is_file()} == before


def test_prepare_killed_and_resumed_gives_the_same_data(prepared, corpus, tmp_path):
    """As if killed while binarizing, and before that while it wrote the contexts."""
    out = tmp_path / "switchboard"
    shutil.copytree(prepared / "text", out / "text")
    (out / "text" / "valid.context.part").write_bytes((out / "text" / "valid.context").read_bytes()[:20])
    (out / "text" / "valid.context").unlink()
    (out / "binarizing").mkdir()
    (out / "binarizing" / "dict.context.txt").write_text("half\n")
    output("prepare.sh", "--from", corpus, "--out", out, "--types", 18, "--workers", 1)
    same = {name: data for name, data in files(prepared).items() if name != "preprocess.log"}  # it has the paths
    assert {name: data for name, data in files(out).items() if name != "preprocess.log"} == same


def test_prepare_refuses_mistakes(corpus, prepared, tmp_path):
    folder, out = shutil.copytree(corpus, tmp_path / "corpus"), tmp_path / "out"
    args = ["--from", folder, "--out", out, "--types", 18]
    text = (folder / "valid.jsonl").read_text().splitlines(keepends=True)
    (folder / "valid.jsonl").write_text(text[0] + text[1][:30] + "\n")
    assert mistake("prepare.sh", *args).startswith(f"prepare_dialog.py: {out}/text/valid.jsonl, line 2 is no dialog: ")
    assert not (out / "text" / "valid.context").exists()
    (folder / "valid.jsonl").write_text("".join(text))
    output("prepare.sh", *args)
    (folder / "valid.jsonl").write_text(text[0])
    message = f"prepare.sh: {out} was prepared with another {folder}/valid.jsonl; choose another --out or remove it"
    assert mistake("prepare.sh", *args) == message
    (folder / "train.jsonl.gz").unlink()
    shutil.rmtree(out)
    message = f"prepare.sh: --from has neither {folder}/train.jsonl nor train.jsonl.gz; another training text may be "
    assert mistake("prepare.sh", *args).startswith(message)
    assert mistake("prepare.sh", *args, "--train", tmp_path / "x") == f"prepare.sh: --train {tmp_path}/x is no file"
    assert "was prepared with other settings" in mistake("prepare.sh", "--from", corpus, "--out", prepared)
    message = "prepare.sh: --types is '0', allowed is a positive whole number"
    assert mistake("prepare.sh", "--types", 0) == message
    assert "prepare_dialog.py: --types is 7, allowed is 8" in mistake(
        "prepare.sh", "--from", corpus, "--out", tmp_path / "few", "--types", 7
    )


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_prepare_downloads(corpus, tmp_path):
    """From a folder in place of the server: a file that is not the original is refused by its git blob id."""
    shutil.copytree(corpus, tmp_path / "web" / "json_data")
    url, text = (tmp_path / "web").as_uri(), tmp_path / "out" / "text"
    done = run("prepare.sh", "--train", corpus / "train.jsonl.gz", "--out", tmp_path / "out", SWITCHBOARD_URL=url)
    assert done.returncode == 1
    content = (corpus / "valid.jsonl").read_bytes()
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    assert f"is not the original: its git blob id is {blob}, not 9c321920c91893" in done.stderr
    assert done.stderr.splitlines()[-1] == (
        f"prepare.sh: {url}/json_data/valid.jsonl could not be downloaded whole; run it again, or give a local copy as "
        "--from"
    )
    assert (text / "train.jsonl").exists() and not (text / "valid.jsonl").exists()


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_prepare_downloads_the_real_files(corpus, tmp_path):
    """Goes on with a part, takes what has the right id, and does without the references."""
    web, out = tmp_path / "web" / "json_data", tmp_path / "out"
    web.mkdir(parents=True)
    for split in ("valid", "test"):
        (web / f"{split}.jsonl").write_bytes(gzip.open(real_path(f"switchboard/{split}.jsonl.gz")).read())
    (out / "text").mkdir(parents=True)
    (out / "text" / "valid.jsonl.part").write_bytes((web / "valid.jsonl").read_bytes()[:1000])
    args = ["--train", corpus / "train.jsonl.gz", "--out", out, "--workers", 1]
    done = run("prepare.sh", *args, SWITCHBOARD_URL=web.parent.as_uri())
    assert done.returncode == 0, done.stderr
    assert "valid 5165 pairs, 69981 tokens" in done.stdout and "test 5481 pairs, 76198 tokens" in done.stdout
    assert "without test_multi_ref.json evaluate.sh scores against the one true response" in done.stderr
    assert done.stderr.count("not the original") == 1  # the training text


# ------------------------------------------------------------------------------------------------- several references


def write_references(folder, responses):
    """test_multi_ref.json: the true response and one more of its length; every third has no more."""
    entries = [
        {"context": ["A: x"], "responses": [response] + ["Zero " * len(response.split())] * (number % 3 > 0)}
        for number, response in enumerate(responses)
    ]
    (folder / "test_multi_ref.json").write_text(json.dumps(entries))


@pytest.mark.slow
def test_several_references(prepared, corpus, tmp_path):
    folder, out = shutil.copytree(corpus, tmp_path / "corpus"), tmp_path / "out"
    responses = lines(prepared / "text" / "test.response")
    write_references(folder, responses)
    done = run("prepare.sh", "--from", folder, "--out", out, "--types", 18, "--workers", 1)
    assert done.returncode == 0, done.stderr
    found = score_dialog.read_references(out / "text" / "test.references")
    assert [texts[0] for texts in found] == [response.split() for response in responses]
    assert [len(texts) for texts in found] == [1 + (n % 3 > 0) for n in range(len(found))]
    assert found[1][1] == ["zero"] * len(found[1][0])

    write_references(folder, [*responses[:2], "another", *responses[3:]])
    with pytest.raises(ValueError, match='entry 3 begins with "another", and the response in line 3 of .* is "'):
        prepare_dialog.references(folder / "test_multi_ref.json", out / "text" / "test.response")
    write_references(folder, responses[1:])
    with pytest.raises(ValueError, match=f"{len(responses) - 1} entries for the {len(responses)} responses of"):
        prepare_dialog.references(folder / "test_multi_ref.json", out / "text" / "test.response")
    (folder / "test_multi_ref.json").write_text('[{"response": 3}]')
    again = run("prepare.sh", "--from", folder, "--out", tmp_path / "again", "--types", 18, "--workers", 1)
    assert again.returncode == 0 and "test_multi_ref.json is no list of" in again.stderr
    assert "evaluate.sh scores against the one true response" in again.stderr
    assert not (tmp_path / "again" / "text" / "test.references").exists()


# ------------------------------------------------------------------------------------------------- score_dialog.py


def test_order_is_restored(tmp_path):
    log = tmp_path / "generate.log"
    log.write_text(
        "noise\nS-2\tx\nH-2\t-1.5\te f\nD-2\t-1.5\te f\nH-2\t-2\t\nH-0\t-1\ta\nH-0\t-2\tb\nH-1\t-3\tc\nH-1\t-4\td\n"
    )
    assert score_dialog.read_generated(log) == [[["a"], ["b"]], [["c"], ["d"]], [["e", "f"], []]]


@pytest.mark.parametrize(
    "text, problem",
    [
        ("H-0\t-1\ta\nH-1\t-2", "line 2 is damaged: wanted is H-NUMBER, a score and a reply"),
        ("H-0\t-1\ta\nH-1\t-2\tb", "line 2 is damaged"),
        ("H-0\t-1\ta\nH-x\t-2\tb\n", "line 2 is damaged"),
        ("H-0\t-1\ta\nH-2\t-2\tb\n", "has 0 replies to context 1 and 1 to another"),
        ("H-0\t-1\ta\nH-1\t-2\tb\nH-1\t-2\tb\n", "has 2 replies to context 1 and 1 to another"),
        ("", "is empty"),
        ("S-0\tx\n", "holds no replies"),
    ],
)
def test_damaged_log_is_refused(text, problem, tmp_path):
    log, references = tmp_path / "generate.log", tmp_path / "references"
    log.write_text(text)
    references.write_text("a\nb\n")
    args = ["--generated", str(log), "--references", str(references)]
    with pytest.raises(UserError, match=f"^{log},? .*{problem}"):
        score_dialog.main(args)


def test_text_that_is_not_utf_8_is_named(tmp_path):
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.write_text("H-0\t-1\ta\n")
    bad.write_bytes(b"H-0\t-1\ta\nH-1\t-1\t\xff\n")
    for generated, references in (bad, good), (good, bad):
        with pytest.raises(UserError, match=f"^{bad}, line 2 is not UTF-8 text: invalid start byte$"):
            score_dialog.main(["--generated", str(generated), "--references", str(references)])


def test_scores_and_signature(tmp_path, capsys):
    log, references, result = tmp_path / "generate.log", tmp_path / "references", tmp_path / "score.json"
    log.write_text("H-1\t-1\tc d\nH-1\t-2\tx\nH-0\t-1\ta b\nH-0\t-2\ta\n")
    references.write_text("a b\ta\nc\n")
    args = ["--generated", str(log), "--references", str(references), "--json", str(result)]
    score_dialog.main([*args, "--replies", str(tmp_path / "replies.txt")])
    assert (tmp_path / "replies.txt").read_text() == "a b\ta\nc d\tx\n"
    expected = corpus_bleu([[["a", "b"], ["a"]], [["c", "d"], ["x"]]], [[["a", "b"], ["a"]], [["c"]]])
    rows = json.loads(result.read_text())
    assert [row["metric"] for row in rows] == [
        f"BLEU-{n} {kind}" for n in range(1, 5) for kind in ("precision", "recall")
    ]
    assert [row["score"] for row in rows] == [values[n] for n in range(4) for values in expected]
    assert {row["signature"] for row in rows} == {"nhyps:2|nrefs:1-2|smooth:nltk-method7|orders:4,padded|scale:0-1"}
    printed = capsys.readouterr().out
    assert f"BLEU-1 precision  {expected.precision[0]:.4f}" in printed and "one reference" not in printed
    for more in (["--replies", str(result)], ["--json", str(log)]):
        with pytest.raises(UserError, match="is not allowed, as .*: choose another name"):
            score_dialog.main([*args, *more])
    references.write_text("a\nc\n")
    score_dialog.main(args)
    assert "one reference for each context: not to be compared" in capsys.readouterr().out
    references.write_text("a\n")
    with pytest.raises(UserError, match="has replies to 2 contexts, .* references for 1$"):
        score_dialog.main(args)


# ------------------------------------------------------------------------------------------ train.sh and evaluate.sh


@pytest.mark.slow
def test_train_and_evaluate(prepared, tmp_path):
    save = tmp_path / "save"
    layer = ["--output-embed-dim", 8, "--gate-dim", 4, "--frequent-ratio", 0.5]
    done = run("train.sh", "mixtape", "--data", prepared, "--save", save, "--cpu", *TINY, *layer)
    assert done.returncode == 0, done.stderr + done.stdout[-2000:]
    log = (save / "train.log").read_text()
    assert log == done.stdout and "epoch 002" in log

    done = run("evaluate.sh", save, "--data", prepared, "--cpu")
    assert done.returncode == 0, done.stderr
    perplexities = {split: (save / f"{split}-perplexity.txt").read_text() for split in ("valid", "test")}
    ppl = {split: float(re.search(r" \| ppl ([\d.]+)\n", text)[1]) for split, text in perplexities.items()}
    assert ppl["valid"] == min(map(float, re.findall(r"valid \| .*? ppl ([\d.]+) ", log)))
    assert 1 < ppl["test"] < 18

    printed = (save / "generate.log").read_text().splitlines()
    sources = {int(line[2:].split("\t")[0]): line.split("\t")[1] for line in printed if line.startswith("S-")}
    contexts = lines(prepared / "text" / "test.context")
    assert list(sources) != sorted(sources) and sorted(sources) == list(range(len(contexts)))
    known = {line.split()[0] for line in lines(prepared / "dict.context.txt")}
    for number, context in enumerate(contexts):
        assert sources[number] == " ".join(word if word in known else "<unk>" for word in context.split())
    replies = lines(save / "replies.txt")
    for number in range(len(contexts)):
        best = [line.split("\t")[2] for line in printed if line.startswith(f"H-{number}\t")]
        assert len(best) == 5 and replies[number] == "\t".join(best)
        assert all(len(reply.split()) <= 30 for reply in best)

    scores = {row["metric"]: row["score"] for row in json.loads((save / "score.json").read_text())}
    hypotheses = [[reply.split() for reply in line.split("\t")] for line in replies]
    expected = corpus_bleu(hypotheses, [[line.split()] for line in lines(prepared / "text" / "test.response")])
    assert scores["BLEU-1 precision"] == expected.precision[0] and scores["BLEU-4 recall"] == expected.recall[3]
    assert 0 < scores["BLEU-1 precision"] <= scores["BLEU-1 recall"]
    assert (save / "score.txt").read_text() in done.stdout and "nhyps:5|nrefs:1|" in done.stdout

    ensemble = f"{save}/checkpoint_best.pt:{save}/checkpoint_last.pt"
    printed = conftest.run("generate", *conftest.generate_args(prepared, ensemble)).stdout
    assert sorted(conftest.hypotheses(printed)) == list(range(len(contexts)))


def test_train_and_evaluate_refuse_mistakes(tmp_path):
    assert mistake("train.sh", "plif").startswith(
        "train.sh: the output layer is 'plif', allowed are softmax, mos, moc "
    )
    message = f"train.sh: --data {tmp_path} holds no binarized data; run prepare.sh first"
    assert mistake("train.sh", "mos", "--data", tmp_path, "--save", tmp_path / "save") == message
    assert not (tmp_path / "save").exists()
    assert mistake("evaluate.sh", tmp_path / "save") == f"evaluate.sh: {tmp_path}/save is no folder"
    assert mistake("evaluate.sh", tmp_path) == f"evaluate.sh: {tmp_path} holds no checkpoint_best.pt"
    (tmp_path / "checkpoint_best.pt").touch()
    message = f"evaluate.sh: --data {tmp_path} holds no text/test.response; run prepare.sh first"
    assert mistake("evaluate.sh", tmp_path, "--data", tmp_path) == message


def test_analyses_of_an_earlier_checkpoint_go(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "test.response").write_text("yes\n")
    for name in ("rank.json", "checkpoint_best.pt", "similarity.json"):
        (tmp_path / name).write_text("")
    os.utime(tmp_path / "rank.json", (1, 1))
    said = 'case $* in *"subset test"*) echo no memory; exit 1 ;; esac; echo "| nll_loss 2 | ppl 4"'
    venv = recipes.stub(tmp_path / "stub", fairseq_validate=said)
    assert mistake("evaluate.sh", tmp_path, "--data", tmp_path, MIXTAPE_VENV=venv).endswith("no memory")
    assert not (tmp_path / "rank.json").exists() and (tmp_path / "similarity.json").exists()


def test_readme_names_the_options():
    readme = (ROOT / "examples" / "switchboard" / "README.md").read_text()
    for script in ("prepare.sh", "train.sh", "evaluate.sh"):
        first = output(script, "--help").splitlines()[0]
        assert all(option in readme for option in re.findall(r"--[a-z]+", first)), script


def test_damaged_references_may_be_mended(tmp_path):
    """No copy of them stays, of which the right ones would differ."""
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.jsonl").write_text('{"utts": [["A", "a"], ["B", "b"]]}\n')
    (tmp_path / "test_multi_ref.json").write_text('[{"response": 3}]')
    venv = recipes.stub(tmp_path / "venv", python=f'exec {sys.executable} "$@"', fairseq_preprocess="exit 1")
    args = ["switchboard", "prepare.sh", "--from", tmp_path, "--out", tmp_path / "out"]
    assert "is no list of" in recipes.run(*args, MIXTAPE_VENV=venv).stderr
    assert not (tmp_path / "out" / "text" / "test_multi_ref.json").exists()
