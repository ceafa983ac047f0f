"""Text by name, path or stdin; cleaning; splits; and every way a source can be no good."""

import contextlib
import gzip
import hashlib
import io
import os
import re
import sys
import threading
import tracemalloc
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elman import corpus, datasets, tokens
from elman.errors import MissingSource, UserError
from elman.text import streaming

MIXED = "The Time Traveller\r\n时间机器 😀 e\u0301\nend"
NEW = b"a small text that is on no disk\n" * 5000


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache of the test's own."""
    folder = tmp_path / "cache"
    monkeypatch.setattr(datasets, "cache_folder", lambda: folder)
    return folder


def refusal(source, **options) -> UserError:
    with pytest.raises(UserError) as refused:
        corpus.load(source, **options)
    assert refused.value.hint
    return refused.value


# Files, folders, stdin


def test_a_file_is_read_exactly(tmp_path):
    path = tmp_path / "mixed.txt"
    path.write_bytes(MIXED.encode())
    assert corpus.load(path) == corpus.load(str(path)) == MIXED
    assert corpus.load_bytes(path) == MIXED.encode()


def test_a_gzip_file_is_read_as_its_contents(tmp_path):
    path = tmp_path / "mixed.gz"
    path.write_bytes(gzip.compress(MIXED.encode()))
    assert corpus.load(path) == MIXED
    assert corpus.load_bytes(path) == MIXED.encode()


def test_a_byte_order_mark_is_not_text(tmp_path):
    path = tmp_path / "marked.txt"
    path.write_bytes(MIXED.encode("utf-8-sig"))
    assert corpus.load(path) == MIXED


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-16-le", "gb18030"])
def test_the_encoding_can_be_named(tmp_path, encoding):
    path = tmp_path / "mixed.txt"
    path.write_bytes(MIXED.encode(encoding))
    assert corpus.load(path, encoding=encoding) == MIXED


def test_a_folder_is_its_texts_in_sorted_order(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "one.txt").write_text("third\n")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "a2.txt.gz").write_bytes(gzip.compress(b"second\n"))
    (tmp_path / "c.TXT").write_text("last")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0")
    assert corpus.load(tmp_path) == "first\nsecond\nthird\nlast"
    assert corpus.load_bytes(tmp_path) == b"first\nsecond\nthird\nlast"


def test_what_of_a_folder_is_no_text_is_told(tmp_path):
    for name in ("a.txt", "b.md", "c.md", "sub/d.html", ".git/e", "run/config.json", "run/f"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    said = corpus.left_out(tmp_path, corpus.texts_in(tmp_path))
    assert said == f"3 of the 4 files in {tmp_path} are not read as text: 2 .md, 1 .html"
    assert corpus.left_out(tmp_path / "sub", [tmp_path / "sub" / "d.html"]) == ""


def test_pipes_and_linked_folders_are_told_as_not_read(tmp_path):
    """A pipe may never end and a link may lead back: neither is read, and neither was told."""
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "a.txt").write_text("text")
    (tmp_path / "books" / "more").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "books" / "p.txt")
    texts = corpus.texts_in(tmp_path / "books")
    assert [file.name for file in texts] == ["a.txt"]
    said = corpus.left_out(tmp_path / "books", texts)
    assert said.startswith("2 of the 3 files")
    assert {"1 more", "1 .txt"} == set(said.split(": ")[1].split(", "))


def test_a_nul_that_is_no_byte_is_refused_as_one(tmp_path):
    path = tmp_path / "seven.txt"
    path.write_bytes(b"zero: +AAA-")  # UTF-7 for U+0000
    with pytest.raises(UserError, match=r"seven.txt is a binary file: it holds NUL bytes; level"):
        corpus.load(path, encoding="utf-7")


@pytest.mark.parametrize(
    ("data", "kind", "command"),
    [
        (b"PK\x03\x04\0rest", "a zip file", "unzip -p"),
        (b"\xfd7zXZ\0\0", "packed by xz", "xz -dc"),
        (b"BZh91AY&SY\xff", "packed by bzip2", "bzip2 -dc"),
        (b"%PDF-1.4\n%\xe2\xe3", "a PDF document", "pdftotext"),
        (b"\x1f\x8b\x08\0", "packed by gzip", "gzip -dc"),
        (b"\x8aELM\x02\x02\x0b", "packed by elman compress", "elman decompress"),
        (b"a.txt".ljust(257, b"\0") + b"ustar", "a tar archive", "tar -xOf"),
    ],
)
def test_a_packed_text_is_named_with_what_unpacks_it(tmp_path, data, kind, command):
    path = tmp_path / "packed text"
    path.write_bytes(data)
    with pytest.raises(UserError, match=f"is {kind}.*not text") as refusal:
        corpus.load(path)
    assert f"{command} '{path}'" in refusal.value.hint
    assert refusal.value.hint.endswith(" > TEXT.txt"), "elman prepare reads no pipe"


@pytest.mark.parametrize("encoding", ["undefined", "rot13", "hex", "base64", "no-such", ""])
def test_a_codec_that_makes_no_text_is_refused(tmp_path, encoding):
    (tmp_path / "a.txt").write_bytes(b"text")
    with pytest.raises(UserError, match="unknown encoding"):
        corpus.load(tmp_path / "a.txt", encoding=encoding)


@pytest.mark.parametrize("encoding", ["punycode", "idna", "unicode_escape", "utf-7"])
@pytest.mark.parametrize("data", [b"xn--\xff\xfe", b"\\x", b"--99999999999z", b"+\xff", b"a" * 90])
def test_a_codec_that_chokes_refuses_and_does_no_worse(tmp_path, encoding, data):
    (tmp_path / "a.txt").write_bytes(data)
    with contextlib.suppress(UserError):
        assert isinstance(corpus.load(tmp_path / "a.txt", encoding=encoding), str)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "an empty source names no text"),
        ("~no-such-user/a.txt", "is not the path of a file"),
        ("a\0b", "is not the path of a file"),
        ("x" * 5000, "is not the path of a file"),
        ("\udcff.txt", "there is no file"),
    ],
)
def test_a_path_that_cannot_be_is_refused(source, message):
    with pytest.raises(UserError, match=message):
        corpus.load(source)


def test_a_gzip_bomb_is_refused_before_it_goes_off(tmp_path):
    path = tmp_path / "bomb.txt.gz"
    path.write_bytes(gzip.compress(bytes(corpus.SMALL * 4)))
    tracemalloc.start()
    with pytest.raises(UserError, match="unpacks to more than 16,777,216 bytes"):
        corpus.load(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3.5 * corpus.SMALL
    path.write_bytes(gzip.compress(b"the time machine " * 1000))  # repetitive, but small
    assert len(corpus.load(path)) == 17_000


def test_closed_stdin_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UserError, match="stdin is closed"):
        corpus.load("-")


def test_a_dash_is_stdin(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(MIXED.encode())))
    assert corpus.load("-") == MIXED


def test_a_home_folder_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "note.txt").write_text("at home")
    assert corpus.load("~/note.txt") == "at home"


def test_a_name_wins_over_a_file_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("python-reference").write_text("a file")
    assert corpus.load("./python-reference") == "a file"
    assert corpus.load(Path("python-reference")) == "a file"
    assert corpus.load("python-reference") != "a file"


# Refusals


def test_invalid_utf8_is_refused_with_its_offset_unless_allowed(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes("the café".encode("latin-1"))
    assert "byte 0xe9 at offset 7" in refusal(path).message
    assert corpus.load(path, encoding="latin-1") == "the café"
    assert corpus.load(path, errors="replace") == "the caf\ufffd"
    assert corpus.load(path, errors="ignore") == "the caf"
    assert corpus.load_bytes(path) == b"the caf\xe9"


def test_a_binary_file_is_refused(tmp_path):
    for data in (b"\x89PNG\r\n\0\0", b"plain\0", MIXED.encode("utf-16-le")):
        path = tmp_path / "file"
        path.write_bytes(data)
        error = refusal(path)
        assert "binary file" in error.message
        assert f"offset {data.index(0)}" in error.message
        assert corpus.load_bytes(path) == data


def test_utf16_with_a_mark_is_recognised_in_the_hint(tmp_path):
    path = tmp_path / "utf16.txt"
    path.write_bytes(MIXED.encode("utf-16"))
    assert "utf-16" in refusal(path).hint


def test_an_empty_file_in_a_folder_is_read_past_and_one_of_empty_files_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"")
    assert "every text in the folder" in refusal(tmp_path).message
    (tmp_path / "b.txt").write_bytes(b"some text")
    (tmp_path / "c.txt").mkdir()
    os.mkfifo(tmp_path / "d.txt")  # nobody ever writes into it
    assert corpus.load(tmp_path) == "some text"
    assert corpus.load_bytes(tmp_path) == b"some text"
    (tmp_path / "e.txt").symlink_to("nowhere")
    assert refusal(tmp_path).hint == "it is a link to nowhere"


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_byte_order_mark_alone_is_an_empty_file(tmp_path, encoding):
    (tmp_path / "a.txt").write_bytes("".encode(encoding))
    read = encoding.removesuffix("-sig")
    for source in (tmp_path / "a.txt", tmp_path):
        with pytest.raises(UserError, match=f"{re.escape(str(source))} is empty"):
            corpus.load(source, encoding=read)
    (tmp_path / "b.txt").write_bytes("one".encode(encoding))
    assert corpus.load(tmp_path, encoding=read) == "one"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_the_encoding_that_is_named_for_a_wide_text_reads_it(tmp_path, encoding):
    path = tmp_path / "wide.txt"
    path.write_text("wide text, and more of it", encoding=encoding)
    said = refusal(path).hint.removeprefix("it looks like encoding=")
    assert corpus.load(path, encoding=said) == "wide text, and more of it"


def test_a_gzip_file_by_another_name_is_called_one(tmp_path):
    path = tmp_path / "book.txt"
    path.write_bytes(gzip.compress(b"text" * 99))
    assert "gzip" in refusal(path).hint


def test_empty_sources_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "empty.txt"
    path.write_bytes(b"")
    assert "empty.txt is empty" in refusal(path).message
    path = tmp_path / "empty.gz"
    path.write_bytes(gzip.compress(b""))
    assert "empty.gz is empty" in refusal(path).message
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert "stdin is empty" in refusal("-").message


def test_a_folder_with_no_text_is_refused(tmp_path):
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    assert "holds no .txt" in refusal(tmp_path).message


def test_a_run_is_no_text_and_says_what_to_do_with_it(tmp_path):
    for name in ("config.json", "metrics.jsonl"):
        (tmp_path / name).touch()
    for taken in (corpus.load, lambda run: streaming.files_of([run])):
        with pytest.raises(MissingSource, match="is a run, and a text is wanted") as caught:
            taken(str(tmp_path))
        assert f"elman evaluate {tmp_path}" in caught.value.hint


def test_what_is_neither_name_nor_file_is_refused_and_names_are_listed():
    error = refusal("time-machin")
    assert isinstance(error, MissingSource)
    assert "no file or text dataset 'time-machin'" in error.message
    assert "did you mean time-machine?" in error.hint
    assert "python-reference, time-machine, tiny-shakespeare" in error.hint
    assert isinstance(refusal("/no/such/file.txt"), FileNotFoundError)


def test_a_series_is_not_a_text():
    assert "sine is a dataset of kind series, not text" in refusal("sine").message


@pytest.mark.parametrize("data", [b"not gzip", gzip.compress(b"cut short" * 99, mtime=0)[:20]])
def test_a_damaged_gzip_file_is_refused(tmp_path, data):
    path = tmp_path / "text.gz"
    path.write_bytes(data)
    assert "is not a whole gzip file" in refusal(path).message


def test_unknown_encodings_and_errors_are_refused_before_anything_is_read():
    assert "unknown encoding 'utf-9'" in refusal("/no/such", encoding="utf-9").message
    assert "strict, replace, ignore" in refusal("/no/such", errors="panic").hint
    assert "'rot13'" in refusal("python-reference", encoding="rot13").message


# Datasets


def test_the_python_reference_needs_no_network_and_no_file():
    text = corpus.load("python-reference")
    assert len(text) > 300_000
    assert "Assert statements are a convenient way" in text
    assert text == corpus.load("python-reference")


def test_the_time_machine_is_the_notes_text(time_machine_file):
    assert corpus.load("time-machine") == time_machine_file.read_bytes().decode()
    lines = corpus.letters(corpus.load("time-machine"))
    assert len(lines) == 3221
    assert lines[0] == "the time machine by h g wells"
    assert lines[10] == "twinkled and his usually pale face was flushed and animated the"
    assert sum(map(len, tokens.tokenize(lines, "char"))) == 170_580
    assert sum(map(len, tokens.tokenize(lines, "word"))) == 32_775


def pretend(monkeypatch, url: str, data: bytes = NEW) -> None:
    sha1 = hashlib.sha1(data).hexdigest()
    dataset = datasets.Dataset("new", "text", "a test", datasets.Download("new.txt", url, sha1))
    monkeypatch.setitem(datasets.DATASETS, "new", dataset)
    monkeypatch.delenv("ELMAN_DATA", raising=False)


@pytest.fixture
def served():
    """What a local web server answers, and how often it was asked."""
    answer = {"status": 200, "body": NEW, "length": len(NEW), "asked": 0}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            answer["asked"] += 1
            self.send_response(answer["status"])
            self.send_header("Content-Length", str(answer["length"]))
            self.end_headers()
            self.wfile.write(answer["body"])

        def log_message(self, format, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    answer["url"] = f"http://127.0.0.1:{server.server_port}/new.txt"
    yield answer
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_download_is_reported_checked_and_kept(served, cache, monkeypatch):
    pretend(monkeypatch, served["url"])
    seen = []
    assert corpus.load("new", progress=lambda *at: seen.append(at)) == NEW.decode()
    assert seen[-1] == (len(NEW), len(NEW))
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert len(seen) > 1
    assert [path.name for path in cache.iterdir()] == ["new.txt"]
    assert corpus.load("new") == NEW.decode()
    assert served["asked"] == 1


def test_elman_data_is_asked_before_the_cache_and_the_cache_before_the_network(
    served, cache, monkeypatch, tmp_path
):
    pretend(monkeypatch, served["url"])
    download = datasets.DATASETS["new"].download
    assert download
    cache.mkdir()
    (cache / "new.txt").write_bytes(NEW)
    assert datasets.present(download) == cache / "new.txt"
    second = tmp_path / "second"
    second.mkdir()
    (second / "new.txt").write_bytes(NEW)
    monkeypatch.setenv("ELMAN_DATA", f"{tmp_path / 'missing'}:{second}")
    assert datasets.present(download) == second / "new.txt"
    assert corpus.load("new") == NEW.decode()
    assert served["asked"] == 0


def test_a_wrong_hash_is_refused_wherever_the_file_was(served, cache, monkeypatch):
    served["body"] = NEW.upper()
    pretend(monkeypatch, served["url"])
    assert "SHA-1" in refusal("new").message
    assert list(cache.iterdir()) == []
    (cache / "new.txt").write_bytes(b"changed")
    assert "new.txt has SHA-1" in refusal("new").message


def test_a_download_cut_short_leaves_nothing(served, cache, monkeypatch):
    served["body"] = NEW[:-1]
    pretend(monkeypatch, served["url"])
    refusal("new")
    assert list(cache.iterdir()) == []


def test_a_cache_that_cannot_be_made_is_not_the_networks_fault(served, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(datasets, "cache_folder", lambda: tmp_path / "file" / "elman")
    pretend(monkeypatch, served["url"])
    error = refusal("new")
    assert "new.txt cannot be kept in the cache" in error.message
    assert str(tmp_path / "file") in error.message
    assert "XDG_CACHE_HOME" in error.hint
    assert served["asked"] == 0


def test_an_absent_page_or_network_is_refused_with_other_ways_to_get_the_text(
    served, cache, monkeypatch
):
    served["status"] = 404
    pretend(monkeypatch, served["url"])
    error = refusal("new")
    assert "could not download" in error.message
    assert "404" in error.message
    pretend(monkeypatch, "http://127.0.0.1:9/new.txt")  # nothing listens there
    error = refusal("new")
    assert "could not download http://127.0.0.1:9/new.txt" in error.message
    assert "ELMAN_DATA" in error.hint
    assert list(cache.iterdir()) == []


# Cleaning and splitting


def test_letters_are_the_notes_cleaning_line_by_line():
    text = "The Time-Machine, 1895\r\n\r\n  naïve café\u2028x\rnext\n"
    assert corpus.letters(text) == ["the time machine", "", "na ve caf x", "next"]
    assert corpus.letters("") == []
    assert corpus.letters("no end") == ["no end"]


SPLITTABLE = st.one_of(
    st.text(min_size=1),
    st.binary(min_size=1),
    st.lists(st.integers(), min_size=1),
)


@given(text=SPLITTABLE, validation=st.floats(0, 0.6), test=st.floats(0, 0.6))
def test_a_split_is_contiguous_whole_and_of_the_asked_sizes(text, validation, test):
    sizes = round(len(text) * validation), round(len(text) * test)
    empty = (validation > 0 and sizes[0] == 0) or (test > 0 and sizes[1] == 0)
    if empty or sum(sizes) >= len(text):
        with pytest.raises(UserError):
            corpus.split(text, validation=validation, test=test)
        return
    parts = corpus.split(text, validation=validation, test=test)
    assert parts.train + parts.validation + parts.test == text
    assert (len(parts.validation), len(parts.test)) == sizes


def test_arrays_and_tensors_are_split_without_copying():
    ids = np.arange(10)
    assert all(np.shares_memory(ids, part) for part in corpus.split(ids, validation=0.2, test=0.1))
    tensor = torch.arange(10)
    parts = corpus.split(tensor, validation=0.2, test=0.1)
    assert [part.tolist() for part in parts] == [[0, 1, 2, 3, 4, 5, 6], [7, 8], [9]]
    assert parts.validation.data_ptr() == tensor.data_ptr() + 7 * 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"validation": 1.0}, "validation=1.0 must be at least 0 and below 1"),
        ({"test": -0.1}, "test=-0.1 must be at least 0"),
        ({"validation": float("nan")}, "validation=nan"),
        ({"validation": 0.5, "test": 0.5}, "leave nothing of 10 tokens"),
        ({"validation": 0.01}, "validation=0.01 of 10 tokens is nothing"),
        ({"test": "0.1"}, "test='0.1' must be at least 0 and below 1; try test=0.1"),
    ],
)
def test_splits_that_cannot_be_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        corpus.split("abcdefghij", **options)
