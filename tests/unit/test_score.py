"""scripts/score.py against sacrebleu's own functions, multi-bleu's formula by hand, and a user's mistakes."""

import json
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import sacrebleu
from real_data import real_lines
from recipes import load_script

from mixtape_plugin.errors import UserError

SCRIPT = Path(__file__).parents[2] / "scripts" / "score.py"
score_script = load_script("score")

NO_FILE = "No such file or directory"
HYPOTHESES = [
    "Ein Mann im T-Shirt spielt auf einer E-Gitarre ein Lied.",
    "Zwei Hunde laufen über die grüne Wiese .",
    "Eine Frau sagt: „Guten Tag“ und geht.",
    "",
    "Ein 10-jähriger Junge isst 3,5 Äpfel & Birnen",
]
REFERENCES = [
    "Ein Mann im T-Shirt spielt ein Lied auf einer E-Gitarre.",
    "Zwei Hunde laufen über eine grüne Wiese.",
    'Eine Frau sagt: "Guten Tag" und geht.',
    "Ein leerer Platz.",
    "Ein 10-Jähriger Junge isst 3,5 Äpfel & Birnen.",
]


def arguments(*args):
    return ["--source-lang", "en", "--target-lang", "de", *map(str, args)]


def write(path, lines):
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def scores(hypotheses=HYPOTHESES, references=REFERENCES, lang="de"):
    return {row["metric"]: row for row in score_script.score(hypotheses, [references], lang)}


def test_chinese_has_a_bleu_of_its_characters():
    """As `sacrebleu -l en-zh` has it; 13a takes a sentence for a word."""
    hypotheses, references = ["我们今天去公园散步。", "他喜欢看书。"], ["我们今天去公园走走。", "他喜欢看书。"]
    expected = sacrebleu.corpus_bleu(hypotheses, [references], tokenize="zh").score
    for lang in "zh", "zh-CN", "zh_TW":
        found = scores(hypotheses, references, lang)
        assert found["BLEU zh"]["score"] == expected > 50 > found["BLEU 13a"]["score"]
    assert "BLEU zh" not in scores()


def test_moses_has_the_rules_of_the_language_whatever_the_country():
    """Moses calls German `de`; of a name it does not know it would silently take English's abbreviations."""
    german = scores()
    for lang in "de_DE", "de-AT":
        assert scores(lang=lang) == german
        assert score_script.moses_tokenize(["Birnen bzw. Trauben"], lang) == ["Birnen bzw. Trauben"]
    assert score_script.moses_tokenize(["Birnen bzw. Trauben"], "tr") == ["Birnen bzw . Trauben"]
    assert "(tr, with abbreviations of en)" in scores(lang="tr")["BLEU tokenized"]["preprocessing"]
    assert "(de)" in german["BLEU tokenized"]["preprocessing"]


def test_a_byte_order_mark_is_no_part_of_a_word(tmp_path):
    for name, mark in ("with", "\ufeff"), ("without", ""):
        (tmp_path / name).write_text(mark + "Ein Hund\nZwei Hunde\n", encoding="utf-8")
        assert score_script.sentences(tmp_path / name) == ["Ein Hund", "Zwei Hunde"]


def multi_bleu(hypotheses, references):
    """BLEU of tokenized text, Papineni et al. 2002: brevity penalty times the geometric mean of clipped precisions."""
    matches, totals, length, reference_length = [0] * 4, [0] * 4, 0, 0
    for hypothesis, reference in zip(map(str.split, hypotheses), map(str.split, references)):
        length += len(hypothesis)
        reference_length += len(reference)
        for n in range(1, 5):
            ours, theirs = (
                Counter(tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1))
                for tokens in (hypothesis, reference)
            )
            matches[n - 1] += sum((ours & theirs).values())
            totals[n - 1] += sum(ours.values())
    precision = math.exp(sum(math.log(m / t) for m, t in zip(matches, totals)) / 4)
    return 100 * min(1, math.exp(1 - reference_length / length)) * precision


def test_agrees_with_sacrebleu():
    found = scores()
    for name, options in [
        ("BLEU 13a", {}),
        ("BLEU intl", {"tokenize": "intl"}),
        ("BLEU 13a lower-cased", {"lowercase": True}),
    ]:
        assert found[name]["score"] == sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES], **options).score
        assert found[name]["preprocessing"] is None
    assert found["chrF"]["score"] == sacrebleu.corpus_chrf(HYPOTHESES, [REFERENCES]).score
    assert found["BLEU 13a"]["signature"] == (
        f"nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:{sacrebleu.__version__}"
    )
    assert len({row["score"] for row in found.values()}) == len(found)  # the sentences tell all variants apart


def test_compounds_split_by_hand():
    atat = "##AT##-##AT##"
    # By hand: Moses tokens, quotes as ASCII (escaped, as Moses does), each hyphen inside a word on its own.
    hypotheses = [
        f"Ein Mann im T {atat} Shirt spielt auf einer E {atat} Gitarre ein Lied .",
        "Zwei Hunde laufen über die grüne Wiese .",
        "Eine Frau sagt : &quot; Guten Tag &quot; und geht .",
        "",
        f"Ein 10 {atat} jähriger Junge isst 3,5 Äpfel &amp; Birnen",
    ]
    references = [
        f"Ein Mann im T {atat} Shirt spielt ein Lied auf einer E {atat} Gitarre .",
        "Zwei Hunde laufen über eine grüne Wiese .",
        "Eine Frau sagt : &quot; Guten Tag &quot; und geht .",
        "Ein leerer Platz .",
        f"Ein 10 {atat} Jähriger Junge isst 3,5 Äpfel &amp; Birnen .",
    ]
    found = scores()
    assert found["BLEU tokenized, compounds split"]["score"] == pytest.approx(multi_bleu(hypotheses, references))
    joined = [[line.replace(f" {atat} ", "-") for line in lines] for lines in (hypotheses, references)]
    assert found["BLEU tokenized"]["score"] == pytest.approx(multi_bleu(*joined))
    assert "##AT##" in found["BLEU tokenized, compounds split"]["preprocessing"]
    assert "tok:none" in found["BLEU tokenized, compounds split"]["signature"]


def test_lower_cased_tokens_by_hand():
    """The hypotheses are tokenized and lower-cased, the references taken as they are."""
    hypotheses = [
        "ein mann im t-shirt spielt auf einer e-gitarre ein lied .",
        "zwei hunde laufen über die grüne wiese .",
        "eine frau sagt : &quot; guten tag &quot; und geht .",
        "",
        "ein 10-jähriger junge isst 3,5 äpfel &amp; birnen",
    ]
    references = [line.lower().replace(".", " .") for line in REFERENCES]
    rows = score_script.score(HYPOTHESES, [REFERENCES], "de", lower_cased_tokens=references)
    (row,) = [row for row in rows if row["metric"] == "BLEU lower-cased tokens"]
    assert row["score"] == pytest.approx(multi_bleu(hypotheses, references))
    assert "case:mixed" in row["signature"] and row["preprocessing"].startswith("lower-casing, sacremoses")
    with pytest.raises(ValueError, match="5 hypotheses and 4 references"):
        score_script.score(HYPOTHESES, [REFERENCES], "de", lower_cased_tokens=references[1:])


def test_quotes_at_a_lines_end_and_abbreviations_are_as_in_moses():
    """Moses reads a line with its end, which a rule for quotes goes by; papers lower-case before they tokenize."""
    says = 'Er sagte: "Ja, das will ich."'
    assert score_script.moses_tokenize([says], "de") == ["Er sagte : &quot; Ja , das will ich &quot; ."]
    rows = score_script.score(["Siehe Nr. 5"], [["x"]], "de", lower_cased_tokens=["siehe nr . 5"])
    (row,) = [row for row in rows if row["metric"] == "BLEU lower-cased tokens"]
    assert row["score"] == pytest.approx(100)


@pytest.mark.parametrize("lang", ["de", "fr"])
def test_lower_cased_tokens_are_those_of_multi30k(lang):
    raw, theirs = (real_lines(f"multi30k/test_2016_flickr.{kind}{lang}") for kind in ("", "lc.norm.tok."))
    assert len(raw) == 1000
    rows = score_script.score(raw, [raw], lang, lower_cased_tokens=theirs)
    (row,) = [row for row in rows if row["metric"] == "BLEU lower-cased tokens"]
    assert row["score"] == pytest.approx(100)
    ours = score_script.moses_tokenize([line.lower() for line in raw], lang)
    assert [line.lower().split() for line in ours] == [line.split() for line in theirs]


def test_split_compounds():
    lines = ["a-b", "Vor- und Nachteil", "- ja", "aa-bb-cc", "x - y"]
    assert score_script.split_compounds(lines) == [
        "a ##AT##-##AT## b",
        "Vor- und Nachteil",
        "- ja",
        "aa ##AT##-##AT## bb ##AT##-##AT## cc",
        "x - y",
    ]


def test_only_german_has_compounds():
    assert "BLEU tokenized, compounds split" not in scores(lang="fr")
    assert "BLEU tokenized" in scores(lang="fr")


def test_several_references():
    rows = score_script.score(HYPOTHESES, [REFERENCES, HYPOTHESES], "de", test_set="two/refs", source_lang="en")
    assert rows[0]["score"] == pytest.approx(100)
    assert rows[0]["signature"].startswith("nrefs:2|") and "test:two/refs|lang:en-de" in rows[0]["signature"]


def test_command_line(tmp_path):
    hypotheses, references = write(tmp_path / "hyp", HYPOTHESES), write(tmp_path / "ref", REFERENCES)
    command = arguments("--hypotheses", hypotheses, "--references", references, "--json", tmp_path / "score.json")
    done = subprocess.run([sys.executable, str(SCRIPT), *command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    rows = json.loads((tmp_path / "score.json").read_text())
    assert {row["metric"]: row for row in rows} == scores()
    for row, line in zip(rows, done.stdout.splitlines()):
        assert line.startswith(row["metric"]) and f" {row['score']:.2f}  {row['signature']}" in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hyp", "ref", "score.json"]


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_a_line_ends_at_newlines_only(tmp_path, ending):
    path = tmp_path / "lines"
    path.write_bytes(ending.join(["a\u2028b\x0bc\x85d", "", "e"]).encode())
    assert score_script.sentences(path) == ["a\u2028b\x0bc\x85d", "", "e"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, f"hyp cannot be read: {NO_FILE}"),
        (b"", "hyp is empty"),
        (b"gut\n\xff\xfe\n", "hyp, line 2 is not UTF-8 text: invalid start byte"),
        (b"eins\nzwei\n", "there are 2 hypotheses and 5 references"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path, capsys, content, message):
    references = write(tmp_path / "ref", REFERENCES)
    if content is not None:
        (tmp_path / "hyp").write_bytes(content)
    files = ["--hypotheses", tmp_path / "hyp", "--references", references, "--json", tmp_path / "score.json"]
    with pytest.raises(UserError) as stop:
        score_script.main(arguments(*files))
    assert str(stop.value).endswith(message)
    assert "\n" not in str(stop.value) and capsys.readouterr().out == ""
    assert not (tmp_path / "score.json").exists()


def test_translations_are_not_written_over(tmp_path):
    for name in ("hyp", "ref"):
        (tmp_path / name).write_text("ein Satz\n")
    files = ["--hypotheses", tmp_path / "hyp", "--references", tmp_path / "ref", "--json"]
    (tmp_path / "link").symlink_to("hyp")
    for name in ("hyp", "ref", "link"):
        with pytest.raises(UserError, match=f"^--json {tmp_path}/{name} is not allowed, as .* is read, too"):
            score_script.main(arguments(*files, tmp_path / name))
    assert (tmp_path / "hyp").read_text() == "ein Satz\n"


def test_a_folder_that_is_not_there(tmp_path):
    files = [write(tmp_path / "hyp", HYPOTHESES), "--references", write(tmp_path / "ref", REFERENCES)]
    with pytest.raises(UserError) as stop:
        score_script.main(arguments("--hypotheses", *files, "--json", tmp_path / "nowhere" / "score.json"))
    assert str(stop.value) == f"--json {tmp_path}/nowhere/score.json cannot be written: {NO_FILE}"


def test_unknown_test_set(tmp_path):
    with pytest.raises(UserError) as stop:
        score_script.main(arguments("--hypotheses", write(tmp_path / "hyp", HYPOTHESES), "--test-set", "nosuch"))
    assert str(stop.value) == "--test-set nosuch is not to be had: No such test set nosuch"


def test_references_in_lower_case_are_not_written_over(tmp_path):
    hypotheses, references, tokens = (write(tmp_path / name, ["ein Satz"]) for name in ("hyp", "ref", "tokens"))
    files = ["--hypotheses", hypotheses, "--references", references, "--lower-cased-tokens", tokens, "--json", tokens]
    with pytest.raises(UserError, match=f"^--json {tokens} is not allowed, as .* is read, too"):
        score_script.main(arguments(*files))
