"""`elman statistics` and `elman ngram`: what they print, write and refuse."""

import io
import json
import math

import pytest

from elman import NgramModel
from elman.cli import run
from elman.errors import UserError
from elman.options import flag

TEXT = "the cat sat on the mat and the dog sat on the cat\n" * 40


@pytest.fixture
def book(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text(TEXT)
    return str(path)


def ask(capsys, *arguments: str) -> dict:
    assert run([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_statistics_print_runs_and_stop_words(capsys, book):
    assert run(["statistics", book, "--top", "2"]) == 0
    said = capsys.readouterr().out
    assert "tokens: 520 in all, 7 different, 0 of them only once" in said
    assert "160  the\n" in said
    assert "80  sat on\n" in said
    assert "stop words, the 2 that make up 46% of it: the cat" in said


def test_statistics_of_the_time_machine_as_json(capsys, time_machine_file, tmp_path):
    figure = tmp_path / "zipf.svg"
    asked = ["statistics", str(time_machine_file), "--clean", "letters", "--figure", str(figure)]
    found = ask(capsys, *asked)
    assert [row["types"] for row in found["runs"]] == [4579, 20234, 29882]
    assert found["runs"][1]["most_common"][0] == [["of", "the"], 309]
    fit = found["runs"][0]["zipf"]
    assert (fit["first"], fit["last"]) == (10, 824)
    assert fit["least_squares"]["alpha"] == pytest.approx(1.038, abs=1e-3)
    assert fit["maximum_likelihood"]["error"] == pytest.approx(0.0058, abs=1e-4)
    assert figure.read_bytes().startswith(b"<?xml")


@pytest.mark.parametrize(("level", "types"), [("char", 4), ("word", 3), ("byte", 5)])
def test_statistics_read_stdin_at_every_level(capsys, monkeypatch, level, types):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("a b a é".encode())))
    found = ask(capsys, "statistics", "-", "--level", level, "--n", "1")
    assert found["runs"][0]["types"] == types
    assert found["runs"][0]["zipf"] is None


def test_ngram_scores_the_held_out_part(capsys, time_machine_file):
    asked = ["ngram", str(time_machine_file), "--clean", "letters", "--order", "3-4"]
    found = ask(capsys, *asked)
    nats = [row["nats_per_token"] for row in found["models"]]
    assert nats == pytest.approx([1.9252, 1.6150], abs=2e-4)
    assert (found["vocabulary"], found["models"][0]["tokens"]) == (28, 17058)
    assert run(asked) == 0
    assert "    4        17,045    1.6150       5.028     2.3300\n" in capsys.readouterr().out


def test_ngram_writes_a_model_an_arpa_file_and_text(capsys, book, tmp_path):
    arpa, out = tmp_path / "m.arpa", tmp_path / "m.safetensors"
    asked = ["ngram", book, "--level", "word", "--order", "3"]
    asked += ["--arpa", str(arpa), "--out", str(out)]
    asked += ["--generate", "5", "--prompt", "the dog", "--temperature", "0"]
    found = ask(capsys, *asked)
    assert found["text"] == "the dog sat on the cat sat"
    loaded, imported = NgramModel.load(out), NgramModel.from_arpa(arpa)
    assert loaded.perplexity(["the", "cat", "sat"]) == pytest.approx(
        imported.perplexity(["the", "cat", "sat"]), rel=1e-6
    )
    assert ask(capsys, *asked)["text"] == found["text"]


@pytest.mark.parametrize(
    ("verb", "option"), [("ngram", "--arpa"), ("ngram", "--out"), ("statistics", "--figure")]
)
def test_a_text_is_not_written_over(capsys, tmp_path, verb, option):
    book = tmp_path / "book.svg"
    book.write_text(text := "the cat sat on the mat " * 9)
    assert run([verb, str(book), option, str(book)]) == 2
    assert "book.svg is what is to be read" in capsys.readouterr().err
    assert book.read_text() == text


@pytest.mark.parametrize("verb", ["statistics", "ngram"])
def test_every_option_that_says_how_a_text_is_read_is_heeded(verb, monkeypatch):
    asked = []

    def read(data):
        asked.append(data)
        raise UserError("this is enough")

    monkeypatch.setattr(f"elman.cli.{verb}.read", read)
    read_as = {"level": "word", "clean": "none", "encoding": "latin-1", "errors": "replace"}
    read_as |= {"vocab_size": 9} | ({"min_freq": 3, "validation": 0.2} if verb == "ngram" else {})
    typed = [word for name, value in read_as.items() for word in (flag(name), str(value))]
    assert run([verb, "book.txt", "--lower", *typed]) == 2
    assert run([verb, "book.txt", "--level", "bpe", "--tokenizer", "learned.json"]) == 2
    first, second = asked
    assert {name: getattr(first, name) for name in read_as} == read_as
    assert (first.source, first.lower, first.tokenizer) == ("book.txt", True, "")
    assert (second.level, second.tokenizer, second.lower) == ("bpe", "learned.json", False)


def test_an_unsmoothed_model_is_honestly_infinite(capsys, tmp_path):
    path = tmp_path / "text"
    path.write_text("ab" * 20 + "ba")
    asked = ["ngram", str(path), "--order", "2", "--smoothing", "laplace", "--epsilon"]
    assert ask(capsys, *asked, "0")["models"][0]["perplexity"] == "Infinity"
    assert ask(capsys, *asked, "1,0.5")["models"][0]["perplexity"] < 4
    asked[asked.index("laplace")] = "laplace-open"
    assert ask(capsys, *asked, "1,0.5")["models"][0]["perplexity"] < 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--order", "0"], "--order 0 must be a number from 1 to 100, or a range"),
        (["--order", "8-1"], "--order 8-1 must be a number from 1 to 100, or a range"),
        (["--order", "two"], "--order two must be a number"),
        (["--order", "²"], "--order ² must be a number"),
        (["--order", "9" * 5000], "must be a number from 1 to 100"),
        (["--order", "-"], "--order - must be a number"),
        (["--order", "1-" + "9" * 30], "must be a number from 1 to 100"),
        (["--generate", "9" * 30], "--generate"),
        (["--min-freq", "9" * 30], f"--min-freq {'9' * 30} must fit into 64 bits"),
        (["--min-freq", "9" * 9], "leaves no token: the most frequent, ' ', occurs"),
        (["--prompt", "the"], "--prompt the means nothing with --generate 0"),
        (["--temperature", "0"], "--temperature 0.0 means nothing with --generate 0"),
        (["--level", "byte", "--errors", "replace"], "--errors replace means nothing with --level"),
        (["--arpa", ""], "an empty path names nothing"),
        (["--arpa", "~nobody-here/a.arpa"], "~nobody-here/a.arpa: Could not determine home"),
        (["--arpa", "/no/such/folder/file"], "there is no folder /no/such/folder"),
        (["--out", "/"], "/ is a folder, not a file"),
        (["--encoding", "undefined"], "unknown encoding 'undefined'"),
        (["--encoding", "rot13"], "unknown encoding 'rot13'"),
        (["--validation", "nan"], "--validation nan is not a number"),
        (["--order", "1-2", "--generate", "9"], "only one can be written"),
        (["--epsilon", "1"], "belong to Laplace"),
        (["--smoothing", "laplace", "--epsilon", "x"], "--epsilon x must be numbers"),
        (["--smoothing", "laplace", "--epsilon", "1,2"], "one for each of 5 orders"),
        (["--smoothing", "none"], "unknown smoothing 'none'"),
        (["--level", "verse"], "unknown level 'verse'"),
        (["--clean", "soap"], "unknown clean 'soap'"),
    ],
)
def test_a_bad_request_exits_with_two(capsys, book, arguments, said):
    assert run(["ngram", book, *arguments]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert "hint: " in err


def test_statistics_refuse_what_cannot_be(capsys, book):
    assert run(["statistics", book, "--first", "9", "--last", "3"]) == 2
    assert "not 9 to 3" in capsys.readouterr().err
    assert run(["statistics", book, "--figure", "zipf.bmp"]) == 2
    assert "zipf.svg" in capsys.readouterr().err
    assert run(["statistics", "no-such-book"]) == 2
    assert "error: " in capsys.readouterr().err


def test_a_prepared_text_is_counted_as_it_was_prepared(capsys, book, tmp_path):
    folder = str(tmp_path / "prepared")
    cut = ["--lower", "--clean", "none", "--validation", "0.2", "--test", "0.1"]
    assert run(["prepare", book, "--out", folder, *cut]) == 0
    capsys.readouterr()
    assert ask(capsys, "statistics", folder)["tokens"] == len(TEXT)
    fitted = ask(capsys, "ngram", folder, "--order", "2")
    assert fitted["train_tokens"] == pytest.approx(0.7 * len(TEXT), rel=0.03)
    [row] = fitted["models"]  # of the test part, as `elman evaluate` reports it
    assert row["tokens"] == pytest.approx(0.1 * len(TEXT), rel=0.03)
    assert row["bits_per_char"] == pytest.approx(row["nats_per_token"] / math.log(2))
    assert run(["ngram", folder, "--validation", "0.1"]) == 2  # what is typed is never overruled
    said = capsys.readouterr().err
    assert "--validation 0.1, but" in said
    assert "was prepared with --validation 0.2" in said
