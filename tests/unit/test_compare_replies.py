"""scripts/compare_replies.py: its page by hand, and a user's mistakes."""

import pytest
from recipes import load_script

from mixtape_plugin.errors import UserError

compare_replies = load_script("compare_replies")

PAGE = """\
Best replies to 3 contexts:

| training | different | most frequent | words |
| --- | --- | --- | --- |
| softmax | 2 | “yeah”, 66.7% | 1.0 |
| mos | 3 | “i see”, 33.3% | 1.7 |

**Context 2**

- me: a | b
- other: no
- the response: why not

|  | softmax | mos |
| --- | --- | --- |
| 1 | yeah | a \\| b |
| 2 | &lt;unk> |  |

**Context 1**

- other: &lt;d>
- the response: hello

|  | softmax | mos |
| --- | --- | --- |
| 1 | yeah | i see |
| 2 | no |  |
"""


@pytest.fixture
def folder(tmp_path):
    texts = {
        "data/text/test.context": "<other> <d>\n<other> <d> <me> a | b <other> no\n<me> x <other> <d>\n",
        "data/text/test.response": "hello\nwhy not\nz\n",
        "softmax/replies.txt": "yeah\tno\nyeah\t<unk>\nhm\tno\n",
        "mos/replies.txt": "i see\na | b\n\n",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def arguments(folder, *trainings):
    return [*(str(folder / name) for name in trainings), "--data", str(folder / "data")]


def test_page_by_hand(folder, capsys):
    args = [*arguments(folder, "softmax", "mos"), "--contexts", "2", "1", "--utterances", "2"]
    compare_replies.main(args)
    assert capsys.readouterr().out == PAGE
    compare_replies.main([*args, "--output", str(folder / "page.md")])
    assert (folder / "page.md").read_text() == PAGE and capsys.readouterr().out == ""


def test_utterances_without_words():
    context = "<other> <d> <me> <other> hi <mexico> <me>"
    assert compare_replies.utterances(context) == ["other: <d>", "me: ", "other: hi <mexico>", "me: "]


def test_mistakes(folder):
    def mistake(*args):
        with pytest.raises(UserError) as error:
            compare_replies.main([*args, "--output", str(folder / "page.md")])
        assert not (folder / "page.md").exists()
        return str(error.value)

    one = arguments(folder, "softmax")
    assert mistake(*one, "--contexts", "4") == "--contexts 4 is not allowed: 1 to 3, the number of contexts"
    assert mistake(*one, "--contexts", "0").startswith("--contexts 0 is not allowed")
    assert mistake(*one, "--utterances", "0") == "--utterances 0 is not allowed: at least 1"
    assert mistake(*arguments(folder, "softmax", "softmax")).endswith("another training is called softmax, too")
    assert mistake(*arguments(folder, "moc")) == f"{folder}/moc/replies.txt cannot be read: No such file or directory"
    (folder / "mos" / "replies.txt").write_text("a\n")
    with pytest.raises(UserError, match="^--output .*/softmax/replies.txt is not allowed, as .* is read, too: choose"):
        compare_replies.main([*one, "--output", str(folder / "softmax" / "replies.txt")])
    assert (folder / "softmax" / "replies.txt").read_text().startswith("yeah\tno\n")
    problem = f"{folder}/mos/replies.txt has 1 lines for 3 contexts: of another test set?"
    assert mistake(*arguments(folder, "softmax", "mos")) == problem
