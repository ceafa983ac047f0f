"""`elman prepare`: texts of any size as a folder of ids, streamed, resumable, checked."""

import gzip
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elman import corpus
from elman.cli import run
from elman.errors import MissingSource, UserError
from elman.files import BLANK_SEAL, write_sealed
from elman.scoring import metrics
from elman.text import batches, learned_vocab, prepared, streaming, token_counts
from elman.text.levels import Subwords, level_of
from elman.text.preparation import Request, prepare
from elman.text.prepared import Data
from elman.text.shards import ShardedIds, Shards
from elman.text.streaming import Stream, files_of

pytestmark = pytest.mark.usefixtures("without_pictures")

WORDS = ["the", "time", "traveller", "née", "文", "it's", "—", "well,", "(for", "so)"]


def sample(words, seed=0):
    chance = random.Random(seed)
    return "".join(chance.choice(WORDS) + chance.choice("  \n") for _ in range(words))


def made(tmp_path, sources, level="char", *, shard_tokens=1000, **options):
    out = tmp_path / f"out-{level}"
    data = Data("-", level, **options)
    steps = list(prepare(Request(tuple(map(str, sources)), data, shard_tokens=shard_tokens), out))
    assert steps[-1].stage == "encoding"
    return Shards(out)


@pytest.fixture
def files(tmp_path):
    """Two texts, of which the first does not end a line, and one in lines of JSON."""
    first, second = tmp_path / "a.txt", tmp_path / "b.txt.gz"
    first.write_bytes(b"\xef\xbb\xbf" + sample(3000).rstrip().encode())
    second.write_bytes(gzip.compress(sample(2000, 1).replace("\n", "\r\n").encode()))
    lines = tmp_path / "c.jsonl"
    lines.write_text("".join(json.dumps({"text": sample(50, i)}) + "\n" for i in range(40)))
    return [first, second, lines]


def whole(files):
    texts = [corpus.load(files[0]) + "\n", corpus.load(files[1])]
    documents = [json.loads(line)["text"] for line in files[2].read_text().splitlines()]
    texts += [d if d.endswith("\n") else d + "\n" for d in documents]
    texts[1] += "" if texts[1].endswith("\n") else "\n"
    texts[-1] = documents[-1]
    return corpus.unix_newlines("".join(texts)), len(documents) + 2


DECIDED = [name for name in prepared.PREPARED if name not in prepared.CUTS]


def decided(index):
    return {name: getattr(index, name) for name in DECIDED}


LEVELS = {"char": {}, "word": {"min_freq": 0}, "byte": {}, "bpe": {"vocab_size": 300}}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("block", [64, 1 << 20])
def test_a_prepared_text_is_the_text(tmp_path, files, level, block, monkeypatch):
    monkeypatch.setattr(streaming, "BLOCK", block)
    shards = made(tmp_path, files, level, **LEVELS[level])
    text, documents = whole(files)
    if level == "byte":  # reads files as they are
        text = text.encode()
        found = shards.vocab.decode_bytes(shards.ids.read()).replace(b"\r\n", b"\n")
        assert found.removeprefix(b"\xef\xbb\xbf") == text
        read = shards.vocab.decode(shards.ids.read())
        assert shards.index.characters == len(read)
        return
    ids = shards.ids.read()
    if level == "bpe" or shards.vocab.unk not in ids:
        assert shards.vocab.decode(ids) == text
    held_out = shards.vocab.decode(shards.validation.read())
    assert shards.index.characters == len(text)
    assert shards.index.held_out_characters == len(text) - len(
        shards.vocab.decode(shards.train.read())
    )
    assert 0.08 < len(held_out) / len(text) < 0.12
    assert shards.vocab.decode(shards.train.read()).endswith("\n")
    begins = shards.documents.tolist()
    assert len(begins) == shards.index.documents == documents
    assert begins[0] == 0
    assert shards.vocab.decode(ids[begins[2] :]).startswith(sample(50, 0))
    assert len(shards.index.shards) == -(-len(ids) // 1000)
    assert shards.ids.max() == ids.max()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("block", [64, 1 << 20])
def test_a_text_is_cut_in_three(tmp_path, files, level, block, monkeypatch):
    monkeypatch.setattr(streaming, "BLOCK", block)
    two = made(tmp_path / "2", files[:1], level, validation=0.3, **LEVELS[level])
    three = made(tmp_path / "3", files[:1], level, validation=0.1, test=0.2, **LEVELS[level])
    assert three.ids.read().tolist() == two.ids.read().tolist()
    assert len(three.train) == len(two.train)
    assert len(three.validation) + len(three.test) == len(two.validation)
    assert three.sha256 != two.sha256
    data = Data("x", level, validation=0.1, test=0.2, **LEVELS[level])
    parts = prepared.prepare(data, three)
    assert parts.part == "test"
    assert parts.reported.read().tolist() == three.test.read().tolist()
    text = three.vocab.decode(three.test)
    assert three.vocab.decode(three.validation).endswith("\n")
    assert parts.characters == len(text)
    assert 0.18 < parts.characters / three.index.characters < 0.22
    with pytest.raises(UserError, match=r"test=0\.1, but .* was prepared with test=0\.2"):
        prepared.prepare(replace(data, test=0.1), three)


@pytest.mark.parametrize("piece", [7, 1 << 20])
@pytest.mark.parametrize("level", ["char", "byte", "bpe"])
def test_a_test_part_is_cut_off_what_a_folder_holds_out(tmp_path, files, level, piece, monkeypatch):
    monkeypatch.setattr(prepared, "PIECE", piece)
    shards = made(tmp_path, files[:1], level, validation=0.3, **LEVELS[level])
    given = prepared.adopted({"source": str(shards.folder), "test": 0.2})
    assert (given["validation"], given["test"]) == (0.1, 0.2)
    assert {name: given[name] for name in DECIDED} == decided(shards.index)
    both = {"source": str(shards.folder), "level": level, "validation": 0.1, "test": 0.2}
    assert prepared.adopted(both) == given | both
    data = Data(**{"min_freq": None} | given)
    parts = prepared.prepare(data, shards)
    assert parts.train.read().tolist() == shards.train.read().tolist()
    rest = [*parts.validation.read(), *parts.test.read()]
    assert rest == shards.validation.read().tolist()
    wanted = len(rest) - round(len(shards.ids) * 0.2)
    lines = (i for i in range(wanted, len(rest)) if shards.vocab.decode([rest[i - 1]])[-1:] == "\n")
    assert len(parts.validation) == next(lines), "the test begins with the next line"
    text = shards.vocab.decode(parts.test)
    assert parts.characters == len(text.replace("<unk>", "?"))
    first = shards.vocab.decode(parts.test[:1])
    if level != "byte":
        assert parts.characters - parts.predicted_characters == len(first.replace("<unk>", "?"))
    assert 0.15 < len(parts.test) / len(shards.ids) < 0.2
    everything = prepared.prepare(replace(data, validation=0.0, test=0.3), shards)
    assert len(everything.validation) == 0
    assert len(everything.test) == len(shards.validation)


def test_a_test_begins_with_a_line_wherever_it_is_asked_to(tmp_path, monkeypatch):
    monkeypatch.setattr(prepared, "PIECE", 3)
    text = tmp_path / "a.txt"
    text.write_text("ab\n\ncd\nefg hi\n" * 4)
    shards = made(tmp_path, [text], validation=0.5)
    held = shards.vocab.decode(shards.validation.read())
    for tokens in range(1, len(held)):
        share = tokens / len(shards.ids)
        data = Data("-", validation=0.5 - share, test=share)
        begin = len(held) - tokens
        lines = (i for i in range(begin, len(held)) if held[i - 1] == "\n")
        assert len(prepared.prepare(data, shards).validation) == next(lines, begin)


@pytest.mark.parametrize(
    ("level", "asked", "why"),
    [
        ("char", {"test": 0.3}, "holds out 0.1 in all"),
        ("char", {"validation": 0.1, "test": 0.05}, "holds out 0.1 in all"),
        ("char", {"validation": 0.05}, "was prepared with validation=0.1"),
        ("word", {"test": 0.05}, "rare words"),
    ],
)
def test_what_cannot_be_cut_later_is_refused_with_the_command_that_can(
    tmp_path, files, level, asked, why
):
    unusual = {"clean": "none", "encoding": "cp1252", "errors": "replace", "vocab_size": 20}
    shards = made(tmp_path, files[:1], level, validation=0.1, lower=True, min_freq=1, **unusual)
    folder = shards.folder
    with pytest.raises(UserError, match=why) as refusal:
        prepared.adopted({"source": str(folder)} | asked)
    if "test" in asked:
        command = refusal.value.hint[refusal.value.hint.index("elman prepare") :]
        assert run(shlex.split(command)[1:]) == 0
        again = Shards(f"{folder}-tested")
        assert again.index.test == asked["test"]
        assert decided(again.index) == decided(shards.index)


def test_a_folder_of_an_older_version_has_no_test(tmp_path, files):
    shards = made(tmp_path, files)
    path = shards.folder / "index.json"
    record = json.loads(path.read_bytes())
    for name in [name for name in record if name.startswith("test")]:
        del record[name]
    write_sealed(path, json.dumps(record | {"seal": BLANK_SEAL}).encode())
    assert Shards(shards.folder).sha256 == shards.sha256
    assert len(Shards(shards.folder).test) == 0


def test_the_vocabulary_is_that_of_the_training_part_alone(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("one two\n" * 90 + "zzz\n" * 20)
    for level in ("char", "word"):
        shards = made(tmp_path, [path], level)
        assert not any("z" in token for token in shards.vocab.idx_to_token)
        assert shards.vocab == prepared.prepare(Data("x", level), path.read_text()[:720]).vocab


def test_zstandard_and_other_fields(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    path = tmp_path / "x.jsonl.zst"
    lines = "".join(json.dumps({"body": f"{i} née\n"}) + "\n" for i in range(30))
    path.write_bytes(zstandard.compress(lines.encode()))
    pieces = list(Stream((path,), field="body").pieces())
    assert [piece.text for piece in pieces] == [f"{i} née\n" for i in range(30)]
    path.write_bytes(zstandard.compress(lines.encode())[:-9])
    with pytest.raises(UserError, match="is not a whole zstd file"):
        list(Stream((path,), field="body").pieces())
    path.write_bytes(zstandard.compress(b'{"body": "one"}\n') + zstandard.compress(b""))
    assert [piece.text for piece in Stream((path,), field="body").pieces()] == ["one"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "latin-1", "utf-16", "utf-16-le"])
def test_lines_of_json_are_read_in_the_encoding_that_is_named(tmp_path, encoding, monkeypatch):
    monkeypatch.setattr(streaming, "BLOCK", 7)
    texts = ["née\r\n", "", "two\x85lines", "ended by the file"]
    lines = "\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts)
    path = _file(tmp_path / "x.jsonl", lines.encode(encoding))
    if encoding == "latin-1":
        with pytest.raises(UserError, match=r"x\.jsonl is not utf-8: byte 0xe9 at offset 11"):
            list(Stream((path,)).pieces())
    pieces = list(Stream((path,), encoding=encoding.removesuffix("-sig")).pieces())
    assert "".join(piece.text for piece in pieces) == "née\r\ntwo\x85lines\nended by the file"
    assert all(piece.ends for piece in pieces if piece.text.endswith("\n"))


@pytest.mark.parametrize("level", ["char", "byte"])
def test_a_packed_file_in_capitals_is_unpacked_as_by_every_other_verb(tmp_path, level):
    (tmp_path / "texts").mkdir()
    path = _file(tmp_path / "texts" / "BOOK.TXT.GZ", gzip.compress(sample(400).encode()))
    for source in (path, path.parent):
        shards = made(tmp_path / source.name, [source], level)
        assert shards.vocab.decode(shards.ids.read()) == corpus.load(source)


def test_a_path_that_cannot_be_is_refused_in_words(tmp_path, capsys):
    assert run(["prepare", "~nobody-here/a.txt", "--out", str(tmp_path / "out")]) == 2
    assert "'~nobody-here/a.txt' is not the path of a file" in capsys.readouterr().err


@given(
    text=st.text(st.sampled_from("ab é\n\r文,'")),
    block=st.integers(1, 9),
    encoding=st.sampled_from(["utf-8", "utf-16-le"]),
    anywhere=st.booleans(),
)
def test_pieces_joined_are_the_file_whatever_their_size(
    tmp_path_factory, text, block, encoding, anywhere
):
    path = tmp_path_factory.mktemp("stream") / "x.txt"
    path.write_bytes(text.encode(encoding))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming, "BLOCK", block)
        stream = Stream((path,), encoding=encoding, anywhere=anywhere)
        pieces = list(stream.pieces())
        lines = path.with_suffix(".jsonl")
        lines.write_text(json.dumps({"text": text}))
        documents = list(replace(stream, files=(lines,), encoding="utf-8").pieces())
    assert [piece.ends for piece in documents] == [False] * (len(documents) - 1) + [True] * bool(
        text
    )
    assert "".join(piece.text for piece in documents) == text
    assert "".join(corpus.unix_newlines(p.text) for p in documents) == corpus.unix_newlines(text)
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True] * bool(pieces)
    clean = "".join(corpus.unix_newlines(piece.text) for piece in pieces)
    assert clean == corpus.unix_newlines(text)


@pytest.mark.parametrize("kind", ["x.txt", "x.jsonl"])
@pytest.mark.parametrize("gap", [",", "\t", "。", "\t(", " "])
def test_a_line_that_is_too_long_for_a_piece_is_cut_between_words(tmp_path, gap, kind, monkeypatch):
    monkeypatch.setattr(streaming, "BLOCK", 100)
    text = gap.join(["it's", "o’clock", "文字", "a_b"] * 200)
    path = tmp_path / kind
    path.write_text(json.dumps({"text": text}) if kind == "x.jsonl" else text)
    pieces = [piece.text for piece in Stream((path,)).pieces()]
    assert "".join(pieces) == text
    assert max(map(len, pieces)) < 220
    words, whole = level_of("word"), level_of("word").tokens(text)
    tokens = [token for piece in pieces for token in words.tokens(piece)]
    if gap == " ":  # goes without saying, but not at the end of a piece
        tokens = [token for token in tokens if token != " "]
    assert tokens == whole
    if gap != " ":
        whole = Subwords().learned_from([text], 300)
        cut = np.concatenate([whole.cut(piece) for piece in pieces])
        assert cut.tolist() == whole.cut(text).tolist()


def test_letters_without_end_are_characters_but_no_words(tmp_path, monkeypatch):
    monkeypatch.setattr(streaming, "BLOCK", 100)
    monkeypatch.setattr(streaming, "LONGEST", 300)
    path = _file(tmp_path / "dna.txt", b"ACGT" * 1000)
    assert made(tmp_path, [path]).ids.read().tolist() == [1, 2, 3, 4] * 1000
    with pytest.raises(UserError, match=r"letters without anything between .* level char or byte"):
        made(tmp_path, [path], "word")
    monkeypatch.setattr(streaming, "LONGEST_LINE", 300)
    lines = _file(tmp_path / "x.jsonl", b'{"text": "a"}\n{"text": "' + b"a " * 300 + b'"}\n')
    with pytest.raises(UserError, match=r"x\.jsonl, line 2 is longer than"):
        made(tmp_path, [lines], "word")


BYTES = st.one_of(st.binary(max_size=12), st.text("é文😀a\n", max_size=6).map(str.encode))


@given(pieces=st.lists(BYTES, max_size=6), cuts=st.lists(st.integers(0, 40), max_size=6))
def test_bytes_cut_anywhere_have_the_characters_of_the_whole(pieces, cuts):
    """A character that a cut goes through once counted on both sides of it."""
    whole, level = b"".join(pieces), level_of("byte")
    before, found = None, 0
    for start, stop in pairwise([0, *sorted(cuts), len(whole)]):
        part = whole[start:stop]
        found += level.characters(part, before)
        assert level.characters(part, whole[:start]) == level.characters(part, before)
        before = level.tail(part, before)
    assert found == len(whole.decode("utf-8", "replace"))


# ---------------------------------------------------------------------- more words than fit


def many(seed, words, spelling="abé文", ends="   \n,"):
    """A text of some frequent and many rare words."""
    chance = random.Random(seed)
    ranks = [int(words ** chance.random()) for _ in range(words)]
    return "".join(
        "".join(random.Random(rank).choices(spelling, k=5)) + chance.choice(ends) for rank in ranks
    )


@pytest.mark.parametrize("level", ["word", "spaced", "char"])
@pytest.mark.parametrize(("vocab_size", "min_freq"), [(0, 0), (0, 2), (40, 0), (41, 3), (9999, 0)])
def test_words_counted_on_disk_make_the_same_vocabulary(
    tmp_path, level, vocab_size, min_freq, monkeypatch
):
    """Room to count a few of the words at a time; room for a vocabulary is another matter."""
    monkeypatch.setattr(streaming, "BLOCK", 300)
    options = {"vocab_size": vocab_size, "min_freq": min_freq}
    path = _file(tmp_path / "x.txt", (many(1, 900) + "<unk> <unk>\n" * 60).encode())
    plain = made(tmp_path / "plain", [path], level, **options)
    counts, fits = token_counts.TokenCounts, []

    def narrow(folder, room, price):
        fits.append(counts(folder, 3 * learned_vocab.WORD, price))
        return fits[-1]

    monkeypatch.setattr(learned_vocab, "TokenCounts", narrow)
    narrowed = made(tmp_path / "narrow", [path], level, **options)
    assert not fits[0].fits
    assert narrowed.vocab.idx_to_token == plain.vocab.idx_to_token
    assert narrowed.ids.read().tolist() == plain.ids.read().tolist()
    frequencies = dict(narrowed.vocab.token_freqs)
    assert frequencies.items() <= dict(plain.vocab.token_freqs).items()
    assert set(plain.vocab.idx_to_token[1:]) <= frequencies.keys()
    assert len(frequencies) <= (vocab_size or len(frequencies))
    assert not list(narrowed.folder.glob(".*"))


def test_a_vocabulary_without_room_is_refused_with_the_sum(tmp_path, monkeypatch):
    monkeypatch.setattr(learned_vocab, "ROOM", 20_000)
    path = _file(tmp_path / "x.txt", many(1, 900, "abcdef", " \n").encode())
    with pytest.raises(UserError) as refused:
        made(tmp_path, [path], "spaced", min_freq=0)
    said = re.fullmatch(
        r"(\d+) of the text's spaced tokens would get an id: at (\d+) bytes each a vocabulary of "
        r"(\d+) kB, and 20 kB are set apart for it",
        refused.value.message,
    )
    hinted = re.match(r"--vocab-size (\d+) has .*, --min-freq (\d+) all", refused.value.hint)
    assert said, refused.value
    assert hinted, refused.value
    words, mean, kilobytes = map(int, said.groups())
    assert (mean, kilobytes) == (440, round(words * 440 / 1000))  # five letters each
    assert int(hinted[1]) == 20_000 // 440
    for option, fits, refused_one in (
        ("vocab_size", int(hinted[1]), int(hinted[1]) + 1),
        ("min_freq", int(hinted[2]), int(hinted[2]) - 1),
    ):
        with pytest.raises(UserError, match="set apart for it"):
            made(tmp_path, [path], "spaced", **{"min_freq": 0, option: refused_one})
        assert not (tmp_path / "out-spaced").exists()  # or what was hinted at would be refused
        kept = made(tmp_path, [path], "spaced", **{"min_freq": 0, option: fits}).vocab
        assert 20 < len(kept) <= 46
        shutil.rmtree(tmp_path / "out-spaced")
    with pytest.raises(UserError, match=r"min_freq=999 leaves no token: the most frequent, "):
        made(tmp_path, [path], "spaced", min_freq=999)


@pytest.mark.parametrize("room", [0, 2000, 10**6])
def test_a_tokenizer_is_learned_from_the_most_frequent_words_that_fit(tmp_path, room, monkeypatch):
    monkeypatch.setattr(learned_vocab, "LEARNING_ROOM", room * learned_vocab.LEARNING_LETTER)
    monkeypatch.setattr(learned_vocab, "LONGEST_LEARNED", 8)
    text = many(2, 2000) + "muchlongerthanthat " * 30 + "\n"
    found = made(tmp_path, [_file(tmp_path / "x.txt", text.encode())], "bpe", vocab_size=500)
    level = Subwords()
    cut = len(found.vocab.decode(found.train))
    stretches = level.stretches(text[:cut])
    if room < 10**6:
        fitting, left = Counter(), room
        for stretch, n in sorted(stretches.items(), key=lambda row: -row[1]):
            if len(stretch) <= 8:
                left -= len(stretch.encode())
                if left < 0:
                    break
                fitting[stretch] = n
        stretches = fitting
    assert (len(stretches) > 0) == (room > 0)
    plain = level.learned_from([s for s, n in stretches.items() for _ in range(n)], 500)
    assert found.vocab.level_used.record() == plain.record()
    assert found.vocab.decode(found.ids.read()) == text


def test_a_vocabulary_of_subwords_without_room_is_refused_with_the_sum(tmp_path, monkeypatch):
    path = _file(tmp_path / "x.txt", many(2, 300).encode())
    with pytest.raises(UserError, match=r"1,000,000 subwords at 400 bytes .* 400 MB, and 268 MB"):
        made(tmp_path, [path], "bpe", vocab_size=10**6)
    given = Subwords().learned_from([path.read_text()], 300)
    tokenizer = tmp_path / "tokenizer.json"
    given.tokenizer.save(str(tokenizer))
    monkeypatch.setattr(learned_vocab, "ROOM", 299 * learned_vocab.WORD)
    with pytest.raises(UserError, match=r"^300 subwords at 400 bytes"):
        made(tmp_path, [path], "bpe", tokenizer=str(tokenizer))


# ---------------------------------------------------------------------- refusals


def test_what_cannot_be_streamed_is_refused(tmp_path, files):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "fine"}\n{"other": 1}\n')
    cases = {
        "line 2: no object with a text in its field 'text'": bad,
        "is a binary file": _file(tmp_path / "n.txt", b"a\0b"),
        "is not utf-8": _file(tmp_path / "l.txt", b"caf\xe9"),
        "is not a whole gzip file": _file(tmp_path / "g.txt.gz", gzip.compress(b"abc" * 99)[:-5]),
        "has no text in it": _file(tmp_path / "e.txt", b""),
    }
    for message, path in cases.items():
        with pytest.raises(UserError, match=message):
            made(tmp_path, [path])
        assert not (tmp_path / "out-char").exists()
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "fl.txt").symlink_to("nowhere")
    with pytest.raises(UserError, match=r"fl.txt: No such .* it is a link to nowhere"):
        made(tmp_path, [tmp_path / "links"])
    with pytest.raises(UserError, match=r"field=body means nothing: none of the files is .jsonl"):
        list(prepare(Request((str(files[0]),), Data("-"), field="body"), tmp_path / "field"))
    assert not (tmp_path / "field").exists()
    with pytest.raises(MissingSource, match="there is no file"):
        files_of([str(tmp_path / "none")])
    with pytest.raises(UserError, match="clean=letters joins all lines"):
        Request(("x",), Data("-", clean="letters"))
    with pytest.raises(UserError, match="leave nothing to train on"):
        Request(("x",), Data("-", validation=0.5, test=0.5))
    with pytest.raises(
        UserError, match=r"test=0\.1 of this text is nothing: parts end where lines"
    ):
        made(tmp_path, [_file(tmp_path / "line.txt", b"one line, and no more of them")], test=0.1)
    shutil.rmtree(tmp_path / "out-char")
    (tmp_path / "out-char").mkdir()
    _file(tmp_path / "out-char" / "letter.doc", b"mine")
    with pytest.raises(UserError, match=r"letter.doc, which is not part of a prepared text"):
        made(tmp_path, files)


def _file(path, data):
    path.write_bytes(data)
    return path


def test_a_prepared_text_is_not_prepared_again(tmp_path, files):
    made(tmp_path, files)
    with pytest.raises(UserError, match="has been prepared already") as caught:
        files_of([str(tmp_path / "out-char")])
    assert "elman train" in (caught.value.hint or "")


def test_what_is_no_text_is_called_what_it_is_as_by_every_other_verb(tmp_path, monkeypatch):
    for data in (
        "naïve café".encode("utf-16"),
        "plain".encode("utf-16-le"),
        b"PK\x03\x04" + bytes(range(255, 100, -1)),
        b"caf\xe9 au lait",
        b"good " * 30 + "日".encode()[:2],  # ends inside of a character
        b"good " * 30 + b"\xe9\xe9 au lait",
        b"good " * 30 + b"\0",
    ):
        path = _file(tmp_path / "x.txt", data)
        with pytest.raises(UserError) as plain:
            corpus.load(path)
        monkeypatch.setattr(streaming, "BLOCK", 1 << 20)
        with pytest.raises(UserError, match=re.escape(str(plain.value))):
            made(tmp_path, [path])
        monkeypatch.setattr(streaming, "BLOCK", 31)  # the place is counted from the file's begin
        with pytest.raises(UserError, match=re.escape(plain.value.message[:60])):
            made(tmp_path, [path])


@pytest.mark.parametrize("stage", ["measuring", "counting", "encoding"])
def test_a_text_that_grows_while_it_is_read_is_refused(tmp_path, stage, monkeypatch):
    """Once, its end was held out beside the part that was to be."""
    monkeypatch.setattr(streaming, "BLOCK", 64)
    path = _file(tmp_path / "log.txt", sample(200).encode())
    steps = prepare(Request((str(path),), Data("-")), tmp_path / "out")
    next(step for step in steps if step.stage == stage)
    with open(path, "a") as file:
        file.write("one more line\n")
    with pytest.raises(UserError, match=r"log\.txt has changed while it was read: from [\d,]+ to"):
        list(steps)
    assert not (tmp_path / "out" / "index.json").exists()
    steps = prepare(Request((str(path),), Data("-")), tmp_path / "gone")
    next(step for step in steps if step.stage == stage)
    path.unlink()
    with pytest.raises(UserError, match=r"log\.txt has gone while it was read|cannot read .*log"):
        list(steps)


def test_a_folder_that_is_whole_is_not_prepared_twice(tmp_path, files):
    made(tmp_path, files)
    with pytest.raises(UserError, match="is a prepared text already"):
        made(tmp_path, files)
    request = Request((str(files[0]),), Data("-"), shard_tokens=1000)
    list(prepare(request, tmp_path / "out-char", force=True))
    assert len(Shards(tmp_path / "out-char").index.shards) < 20


def damages(folder, chance):
    """Fifty ways to damage a folder: bytes flipped, added, cut, files missing or exchanged."""
    names = sorted(path.name for path in folder.iterdir() if path.stat().st_size)
    for number in range(50):
        path = folder / names[number % len(names)]
        data = path.read_bytes()
        where = chance.randrange(len(data))
        ways = {
            "flipped": data[:where]
            + bytes([data[where] ^ 1 << chance.randrange(8)])
            + data[where + 1 :],
            "cut": data[:where],
            "added": data[:where] + b"\0" + data[where:],
            "missing": None,
            "zeroed": bytes(len(data)) if any(data) else None,
        }
        way = list(ways)[number // len(names) % len(ways)]
        yield path, way, ways[way]


def test_fifty_damages_are_refused_fifty_times_by_name(tmp_path, files):
    shards = made(tmp_path, files, "bpe", vocab_size=300, shard_tokens=3000)
    folder, seen = shards.folder, set()
    for path, way, data in damages(folder, random.Random(0)):
        before = path.read_bytes()
        path.unlink() if data is None else path.write_bytes(data)
        if path.name == "index.json" and data is None:
            assert not prepared.is_prepared(folder)
        with pytest.raises(UserError, match=path.name):
            Shards(folder)
        path.write_bytes(before)
        seen.add((path.name, way))
    assert len(seen) > 20
    assert Shards(folder).sha256 == shards.sha256


# ---------------------------------------------------------------------- killed and resumed


@pytest.mark.parametrize("level", ["word", "bpe", "byte"])
def test_a_killed_preparation_goes_on_to_the_same_files(tmp_path, files, level, monkeypatch):
    monkeypatch.setattr(streaming, "BLOCK", 500)
    options = LEVELS[level]
    once = made(tmp_path, files, level, shard_tokens=700, **options).folder
    again = tmp_path / "again"
    request = Request(tuple(map(str, files)), Data("-", level, **options), shard_tokens=700)
    chance, kills = random.Random(1), 0
    while True:
        steps = prepare(request, again)
        for _ in range(chance.randrange(1, 60 + 40 * kills)):  # each lives longer than the last
            if next(steps, None) is None:
                break
        else:
            kills += 1
            steps.close()  # as a kill: nothing more is written
            again.mkdir(exist_ok=True)  # stopped before there was anything, it has gone
            _file(again / ".00001.ids.77.partial", b"half a shard")
            continue
        break
    assert kills > 3
    assert contents(again) == contents(once)


KILLED = """
import random, signal, sys, time
from pathlib import Path
from elman.text import learned_vocab, preparation, streaming
from elman.text.prepared import Data

streaming.BLOCK, learned_vocab.ROOM, learned_vocab.LEARNING_ROOM = 2000, 400_000, 140_000
chance, steps, began = random.Random(int(sys.argv[4])), 0, time.monotonic()
data = Data("-", sys.argv[3], vocab_size=700)
request = preparation.Request((sys.argv[1],), data, shard_tokens=2000)
for step in preparation.prepare(request, Path(sys.argv[2])):
    steps += 1
    if steps == int(sys.argv[5]):  # the kernel ends it, now or some steps later, nothing tidied up
        some = 8 * (time.monotonic() - began) / steps
        signal.setitimer(signal.ITIMER_REAL, 1e-6 + chance.choice((0, chance.random() * some)))
"""


@pytest.mark.parametrize("level", ["word", "bpe"])
def test_words_counted_on_disk_survive_a_kill_at_any_moment(tmp_path, level, monkeypatch):
    path = _file(tmp_path / "x.txt", many(3, 20_000).encode())

    def run_until(folder, seed, steps):
        arguments = [path, tmp_path / folder, level, seed, steps]
        command = [sys.executable, "-c", KILLED, *map(str, arguments)]
        return subprocess.run(command, stderr=subprocess.PIPE, text=True).returncode

    assert run_until("once", 0, -1) == 0
    seen = []  # 99 steps measure, 88 count and 100 encode; the first two are done whole or again
    for seed, steps in enumerate((70, 130, 20, 50, 75, 95, 30, 10, -1)):
        code = run_until("again", seed, steps)
        assert code in (0, -signal.SIGALRM)
        seen.append(sorted(file.name for file in (tmp_path / "again").iterdir()))
        if code == 0:
            break
    assert len(seen) > 4
    assert any(".counts-00000.partial" in names for names in seen), seen
    assert contents(tmp_path / "again") == contents(tmp_path / "once")


def test_another_request_does_not_go_on_there(tmp_path, files):
    steps = prepare(Request((str(files[0]),), Data("-"), shard_tokens=100), tmp_path / "out")
    while next(steps).stage != "encoding":
        pass
    steps.close()
    with pytest.raises(UserError, match="the beginning of another preparation"):
        list(prepare(Request((str(files[0]),), Data("-", lower=True)), tmp_path / "out"))


# ---------------------------------------------------------------------- one at a time, and --force


def contents(folder):
    """Every file; the lock of a process that was killed is nobody's."""
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file() and p.name != ".lock"}


def test_one_process_at_a_time_prepares_in_a_folder(tmp_path, files, capsys):
    out = tmp_path / "out"
    request = Request((str(files[0]),), Data("-"), shard_tokens=1000)
    steps = prepare(request, out)
    next(steps)
    for force in (False, True):
        with pytest.raises(UserError, match="being prepared already, in this very process"):
            next(prepare(request, out, force=force))
    seen = subprocess.run(
        [sys.executable, "-m", "elman", "prepare", str(files[0]), "--out", str(out), "--force"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert seen.returncode == 2
    assert f"is being prepared already, by process {os.getpid()} on " in seen.stderr
    list(steps)
    assert not (out / ".lock").exists()
    assert len(Shards(out).ids) > 1000


def test_a_prepared_text_is_kept_until_another_is_whole(tmp_path, files, capsys):
    out = made(tmp_path, files[:1]).folder
    before, aside = contents(out), out / ".replaced"
    request = Request((str(files[1]),), Data("-", "word"), shard_tokens=300)
    steps = prepare(request, out, force=True)
    for step in steps:
        if step.stage == "encoding":
            break
    assert contents(aside) == before
    steps.close()  # stopped: another goes on, and the old one is still there
    assert contents(aside) == before
    list(prepare(request, out))
    assert not aside.exists()
    assert Shards(out).index.level == "word"


def test_a_preparation_that_fails_leaves_the_text_that_was_there(tmp_path, files):
    out = made(tmp_path, files[:1]).folder
    before = contents(out)
    bad = _file(tmp_path / "bad.txt", sample(3000).encode() + b"\xff")
    for sources, options in (([bad], {}), (files[:1], {"min_freq": 10**6})):
        request = Request(tuple(map(str, sources)), Data("-", "word", **options))
        with pytest.raises(UserError):
            list(prepare(request, out, force=True))
        assert contents(out) == before
        assert not (out / ".replaced").exists()
    with pytest.raises(UserError, match="is a prepared text already"):
        list(prepare(request, out))
    with pytest.raises(UserError, match="not part of a prepared text"):
        list(prepare(request, files[0].parent, force=True))
    assert contents(out) == before


def test_a_refusal_does_not_touch_another_preparation(tmp_path, files):
    out = made(tmp_path, files[:1]).folder
    steps = prepare(Request((str(files[1]),), Data("-"), shard_tokens=100), out, force=True)
    while next(steps).stage != "encoding":
        pass
    steps.close()
    before, aside = contents(out), contents(out / ".replaced")
    with pytest.raises(UserError, match="the beginning of another preparation"):
        list(prepare(Request((str(files[0]),), Data("-", lower=True)), out))
    assert (contents(out), contents(out / ".replaced")) == (before, aside)


def test_a_replacement_is_the_old_text_or_the_new_wherever_it_is_killed(
    tmp_path, files, killed_after
):
    old = made(tmp_path / "old", files[:1]).folder
    new = made(tmp_path / "new", files[1:2]).folder
    request, seen = Request((str(files[1]),), Data("-"), shard_tokens=1000), []
    whole = {"old": contents(old), "new": contents(new)}
    for moves in range(1000):
        out = shutil.copytree(old, tmp_path / str(moves))
        ended = not killed_after(moves, lambda out=out: list(prepare(request, out, force=True)))
        with suppress(UserError):  # "is a prepared text already": then it is whole
            list(prepare(request, out))
        seen += [name for name in whole if contents(out) == whole[name]] or ["neither"]
        assert not (out / ".replaced").exists(), moves
        shutil.rmtree(out)
        if ended:
            break
    assert seen == sorted(seen, reverse=True), "old at first, then new, never neither"
    assert set(seen) == {"old", "new"}
    assert len(seen) > 20


# ---------------------------------------------------------------------- ids from many files


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1),
    start=st.integers(0, 30),
    stop=st.integers(0, 30),
)
def test_ids_of_many_files_are_one_array(sizes, start, stop):
    total = np.arange(sum(sizes), dtype="u1")
    edges = np.cumsum([0, *sizes])
    ids = ShardedIds([total[a:b] for a, b in pairwise(edges)], 255)
    assert ids[start:stop].read().tolist() == total[start:stop].tolist()
    assert len(ids[start:stop]) == len(total[start:stop])
    assert [int(ids[i]) for i in range(len(ids))] == total.tolist()


@pytest.mark.parametrize("kind", [batches.streams, batches.shuffled])
def test_windows_of_many_files_are_those_of_one(kind):
    total = np.random.default_rng(0).integers(0, 250, 1000).astype("u1")
    ids = ShardedIds([total[:333], total[333:334], total[334:]], 255)
    pairs = zip(kind(ids, batch=5, window=7), kind(total, batch=5, window=7), strict=True)
    for (x, y), (u, v) in pairs:
        assert (x == u).all()
        assert (y == v).all()


def test_a_held_out_text_in_many_files_scores_as_in_one():
    from elman import LanguageModel

    total = np.random.default_rng(0).integers(0, 9, 9000).astype("u1")
    ids = ShardedIds([total[:3333], total[3333:]], 9)
    model = LanguageModel(10, hidden_size=4)
    for lanes in (1, 16):
        plain = metrics.evaluate(model, total, lanes=lanes)
        assert metrics.evaluate(model, ids, lanes=lanes) == plain


# ---------------------------------------------------------------------- every verb


def test_every_verb_takes_a_prepared_text(tmp_path, files, capsys):
    folder = str(made(tmp_path, files, "bpe", vocab_size=300).folder)
    out = str(tmp_path / "run")
    tiny = "--preset quick --hidden-size 6 --epochs 1 --batch-size 4 --device cpu".split()  # noqa: SIM905
    assert run(["train", folder, "--out", out, *tiny]) == 0
    assert run(["train", "--resume", out, "--epochs", "2"]) == 0
    for verb in (["evaluate", out], ["evaluate", out, folder], ["ngram", folder]):
        assert run(verb) == 0
        assert "bits/char" in capsys.readouterr().out
    assert run(["statistics", folder]) == 0
    assert run(["generate", out, "--length", "5"]) == 0
    prepare_it = ["prepare", *map(str, files[:1]), "--level", "word", "--test", "0.2"]
    assert run([*prepare_it, "--out", str(tmp_path / "tested")]) == 0
    assert "of those to test with" in capsys.readouterr().out
    tested = ["train", str(tmp_path / "tested"), "--out", str(tmp_path / "other"), *tiny]
    assert run([*tested, "--test", "0.1"]) == 2
    assert "was prepared with --test 0.2" in capsys.readouterr().err
    assert run([*tested, "--test", "0.2"]) == 0
    assert capsys.readouterr().out.startswith("test, ")
    assert run(["evaluate", str(tmp_path / "other")]) == 0
    assert run(["train", folder, "--level", "char", *tiny]) == 2
    assert "was prepared with --level bpe" in capsys.readouterr().err
    later = ["train", folder, "--test", "0.05", "--out", str(tmp_path / "later"), *tiny]
    assert run(later) == 0
    assert capsys.readouterr().out.startswith("test, ")
    assert run(["evaluate", str(tmp_path / "later")]) == 0
    assert "bits/char" in capsys.readouterr().out
    assert run(["train", "--resume", str(tmp_path / "later"), "--epochs", "2"]) == 0
    index = tmp_path / "out-bpe" / "00000.ids"
    _file(index, index.read_bytes()[::-1])
    assert run(["train", "--resume", out, "--epochs", "3"]) == 2
    assert "00000.ids is damaged" in capsys.readouterr().err


# ---------------------------------------------------------------------- memory


STREAMED = """
import re, sys
from pathlib import Path
from elman.text.preparation import Request, prepare
from elman.text.prepared import Data
def peak():  # of this program: ru_maxrss begins with that of the one that started it
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) // 1024
before = peak()
for step in prepare(Request((sys.argv[1],), Data("-", sys.argv[3], vocab_size=int(sys.argv[4])),
                            shard_tokens=int(sys.argv[5])), Path(sys.argv[2])):
    pass
print(before, peak())
"""


def peak(tmp_path, megabytes, level, vocab_size, shard_tokens):
    """Megabytes before, and at most, of a process that prepares so many of text."""
    path, line = tmp_path / "large.txt", sample(20_000).encode()
    with open(path, "wb") as file:
        for _ in range(megabytes * 1_000_000 // len(line)):
            file.write(line)
    return memory(path, tmp_path / "large", level, vocab_size, shard_tokens)


def memory(*arguments):
    done = subprocess.run(
        [sys.executable, "-c", STREAMED, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=True,
    )
    return tuple(map(int, done.stdout.split()))


def test_memory_does_not_grow_with_the_text(tmp_path):
    before, most = peak(tmp_path, 60, "byte", 0, 1 << 22)
    assert most - before < 40


def test_time_grows_with_the_documents_not_with_their_square(tmp_path):
    """Sixty thousand lines of JSON once took four minutes."""

    def seconds(documents):
        path = _file(tmp_path / "x.jsonl", b'{"text": "a"}\n' * documents)
        began = time.process_time()
        shards = made(tmp_path / str(documents), [path], "byte", shard_tokens=1 << 20)
        took = time.process_time() - began
        assert shards.documents.tolist() == list(range(0, 2 * documents, 2))
        shutil.rmtree(shards.folder)
        return took

    few, many = (min(seconds(documents) for _ in range(3)) for documents in (2000, 16_000))
    assert many < 16 * few  # 8, if each costs the same; it was 37


@pytest.mark.slow
@pytest.mark.parametrize(("level", "vocab_size"), [("word", 0), ("bpe", 1000), ("char", 0)])
def test_two_gigabytes_are_streamed_in_600_megabytes(tmp_path, level, vocab_size):
    _, most = peak(tmp_path, 2000, level, vocab_size, 1 << 24)
    assert most < 600


@pytest.mark.slow
@pytest.mark.parametrize("level", ["word", "bpe"])
def test_any_number_of_words_is_prepared_in_600_megabytes(tmp_path, level):
    """Four million different words, and then once more the same; 2 GB were too few for them."""
    path = tmp_path / "large.txt"
    with open(path, "w") as file:
        for number in [*range(4_000_000)] * 2:
            file.write(f"{number * 7919 % 4_000_037:06x}{'' if number % 9 else chr(10)} ")
    _, most = memory(path, tmp_path / "large", level, 30_000, 1 << 24)
    assert most < 600


@pytest.mark.parametrize(
    ("text", "parts", "why"),
    [
        (b"abc", {"validation": 0.1}, r"validation=0\.1 of this text is nothing"),
        (b"one\n", {"validation": 0.1}, r"validation=0\.1 of this text is nothing"),
        (b"a\n" + b"x" * 50 + b"\n", {"validation": 0.1, "test": 0.3}, "of this text is nothing"),
        (b"a\n" + b"x" * 26 + b"\n", {"validation": 0.99}, "leave nothing of this text to train"),
    ],
)
def test_a_part_that_comes_out_empty_is_refused_as_in_memory(tmp_path, text, parts, why):
    with pytest.raises(UserError, match=why):
        made(tmp_path, [_file(tmp_path / "short.txt", text)], **parts)
    assert not list((tmp_path / "out-char").glob("index*"))
