"""The book: both languages run the same code, every chapter has its exercises, names exist."""

import importlib
import json
import re
from pathlib import Path

import pytest

from elman import notes
from publishing.pages import BLOCK, DOCS, ROOT, blocks

CHAPTERS = sorted(path.name for path in (DOCS / "book").glob("0*.md"))
NOTES = [
    "load_array",
    "init_weights",
    "get_net",
    "train",
    "evaluate_loss",
    "DATA_HUB",
    "DATA_URL",
    "download",
    "plot",
    "read_time_machine",
    "tokenize",
    "Vocab",
    "count_corpus",
    "load_corpus_time_machine",
    "seq_data_iter_random",
    "seq_data_iter_sequential",
    "SeqDataLoader",
    "load_data_time_machine",
    "one_hot",
    "get_params",
    "init_rnn_state",
    "rnn",
    "RNNModelScratch",
    "begin_state",
    "predict_ch8",
    "grad_clipping",
    "train_epoch_ch8",
    "train_ch8",
    "sgd",
    "Timer",
    "Accumulator",
    "Animator",
    "try_gpu",
    "RNN",
    "GRU",
    "LSTM",
    "RNNModel",
]
"""Every function and class that the notes' code defines or calls by a name of its textbook."""


def resolve(name: str):
    """The object of a dotted name: the longest module in it, then attributes."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[cut:]:
            found = getattr(found, attribute)
        return found
    raise ModuleNotFoundError(name)


def code_of(path: Path) -> list[str]:
    return [block.code for block in blocks(path.read_text(encoding="utf-8"))]


def test_there_are_eight_chapters_and_an_index_that_links_them():
    assert len(CHAPTERS) == 8
    index = (DOCS / "book" / "index.md").read_text(encoding="utf-8")
    assert re.findall(r"\]\((0\d-[\w-]+\.md)\)", index) == CHAPTERS


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_chapter_ends_with_three_exercises_and_their_solutions(chapter):
    page = (DOCS / "book" / chapter).read_text(encoding="utf-8")
    before, solutions = page.split("\n## Solutions\n")
    exercises = before.split("\n## Exercises\n")[1]
    assert re.findall(r"^(\d)\. ", exercises, re.MULTILINE) == ["1", "2", "3"]
    assert "*(beyond the notes)*" in exercises.split("\n3. ")[1]
    assert re.findall(r"^\*\*(\d)\.\*\*", solutions, re.MULTILINE) == ["1", "2", "3"]


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_chapter_checks_what_it_says(chapter):
    code = code_of(DOCS / "book" / chapter)
    assert len(code) >= 8
    assert sum("assert" in block for block in code) >= len(code) // 2


@pytest.mark.parametrize("chapter", ["index.md", *CHAPTERS])
def test_both_languages_run_the_same_code(chapter):
    english, chinese = DOCS / "book" / chapter, DOCS / "zh" / "book" / chapter
    assert code_of(english) == code_of(chinese)


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_chapter_runs_where_there_is_no_checkout(chapter):
    """A notebook's reader has installed elman, and has no benchmarks beside it."""
    code = "\n".join(code_of(DOCS / "book" / chapter))
    assert not re.search(r"__file__|benchmarks|\bdocs/|\.\./", code)


@pytest.mark.parametrize("name", ["notes", "carries"])
def test_what_the_package_brings_is_what_was_measured(name):
    measured = (ROOT / "benchmarks" / "results" / f"{name}.json").read_text("utf-8")
    assert notes.measured(name) == json.loads(measured)


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_the_chinese_chapter_is_the_whole_chapter_in_chinese(chapter):
    english, chinese = (prose_of(DOCS / folder / chapter) for folder in ("book", "zh/book"))
    for mark in (r"^## ", r"^### ", r"^\$\$", r"^\d\. ", r"^\*\*\d\.\*\*"):
        assert len(re.findall(mark, chinese, re.M)) == len(re.findall(mark, english, re.M)), mark
    assert len(re.findall(r"[\u4e00-\u9fff]", chinese)) > 600
    sentences = re.sub(r"`[^`]*`|\$[^$]*\$|\([^)]*\.md\)", "", chinese)
    assert not re.search(r"(?:\b[a-z]+ ){6}", sentences), "an English sentence was left"


def test_chinese_is_punctuated_in_chinese():
    """No comma, colon or bracket of half a width between two Chinese characters."""
    pages = [ROOT / "README.zh.md", *sorted((DOCS / "zh").rglob("*.md"))]
    for path in pages:
        prose = re.sub(r"```.*?```|`[^`]*`|\$[^$]*\$|\]\([^)]*\)", "", prose_of(path), flags=re.S)
        half = re.findall(
            r"[\u4e00-\u9fff][,;:!?()\"'][\u4e00-\u9fff]?|[(\"'][\u4e00-\u9fff]", prose
        )
        assert not half, f"{path.relative_to(ROOT)}: {half}"


def test_headings_have_no_latex_which_a_table_of_contents_cannot_draw():
    for path in DOCS.rglob("*.md"):
        headings = re.findall(r"^#+ .*", prose_of(path), re.M)
        assert not [heading for heading in headings if "$" in heading]


def prose_of(path: Path) -> str:
    return BLOCK.sub("", path.read_text(encoding="utf-8"))


def test_the_notes_own_terms_are_used():
    pages = "".join(
        path.read_text(encoding="utf-8") for path in sorted((DOCS / "zh").glob("**/*.md"))
    )
    terms = (
        "循环神经网络 通过时间反向传播 困惑度 梯度裁剪 隐状态 词元 词表 顺序分区 随机抽样 独热向量 "
        "拉普拉斯平滑 齐普夫定律 停用词 自回归模型 隐变量自回归模型 马尔可夫链 随机截断 梯度消失 "
        "梯度爆炸 利普希茨 迭代周期 计算图"
    )
    for term in terms.split():
        assert term in pages, term


def test_both_readmes_have_the_same_code_figures_commands_and_pages():
    english, chinese = (
        (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh.md")
    )
    assert [b.code for b in blocks(english)] == [b.code for b in blocks(chinese)]
    assert shell(english) == shell(chinese)
    patterns = {
        "figures": r"\d+(?:[.,]\d+)+",
        "pages": r"\]\((?:docs/)?(?!zh/|book/|concordance)([\w-]+\.md)\)",
        "folders": r"`([\w/]+/|[\w/]+\.py)`",
    }
    for what, pattern in patterns.items():
        found = [set(re.findall(pattern, page, re.M)) for page in (english, chinese)]
        found = [names - {"README.md", "README.zh.md"} for names in found]
        assert found[0] == found[1], (
            f"{found[0] ^ found[1]}: {what} of one README, not of the other"
        )


def shell(page: str) -> list[str]:
    """The commands of a page, without what is said about them."""
    told = "\n".join(re.findall(r"^```sh\n(.*?)^```", page, re.M | re.S))
    return [line.partition("#")[0].strip() for line in told.splitlines()]


def test_both_first_pages_have_the_same_commands():
    pages = [(DOCS / name).read_text(encoding="utf-8") for name in ("index.md", "zh/index.md")]
    assert shell(pages[0]) == shell(pages[1])
    assert "elman lab" in shell(pages[0])


def test_every_page_of_the_guide_is_in_its_table():
    table = (DOCS / "guide.md").read_text(encoding="utf-8")
    pages = {path.name for path in DOCS.glob("*.md")} - {"index.md", "guide.md"}
    assert pages - set(re.findall(r"\]\((\w+\.md)\)", table)) == {"concordance.md", "results.md"}


def test_both_concordances_have_the_same_names():
    names = [sorted(re.findall(r"`(elman[\w.]*)`", concordance(at))) for at in ("", "zh")]
    assert names[0] == names[1]
    rows = [len(re.findall(r"^\|", concordance(language), re.M)) for language in ("", "zh")]
    assert rows[0] == rows[1]


def concordance(language: str = "") -> str:
    return (DOCS / language / "concordance.md").read_text(encoding="utf-8")


def test_the_concordance_has_every_name_of_the_notes():
    firsts = re.findall(r"^\| (`[^|]*)\|", concordance(), re.MULTILINE)
    named = {word.split(".")[-1] for cell in firsts for word in re.findall(r"`([^`]+)`", cell)}
    assert set(NOTES) - named == set()


def test_every_name_of_the_concordance_exists():
    page = concordance()
    elsewhere = set(re.findall(r"`(elman\.[\w.]+)`", page))
    assert len(elsewhere) >= 40
    for name in sorted(elsewhere):
        resolve(name)
    table = page.split("## Equations")[1].split("Perplexity is")[0]
    equations = re.findall(r"`(\w+)`", " ".join(re.findall(r"^\|[^|]*\|([^|]*)\|", table, re.M)))
    assert len(equations) >= 20
    for name in equations:
        resolve(f"elman.gradients.equations.{name}")
    for row in re.findall(r"^\| `[^|]*\| ([^|]*) \| `elman", page, re.MULTILINE):
        for name in re.findall(r"`(\w+)`", row):
            resolve(f"elman.notes.{name}")
