"""Compressed files decode to the same bytes, whoever decodes them, or are refused."""

import hashlib
import io
import itertools
import json
import math
import os
import random
import shlex
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from elman import compression
from elman.cli import run as cli
from elman.compression import container, library, reference
from elman.compression.container import Header
from elman.compression.library import AVX2, AVX512, PORTABLE, Native, Plain, native
from elman.compression.options import LEVELS, Options
from elman.compression.pretrained import network_of
from elman.compression.primer import PRIMER
from elman.compression.reference.network import Network
from elman.errors import UserError
from elman.runs import Run

TINY = {"rate_units": 100, "last_rate_units": 40, "mixing_units": 20}
built = pytest.mark.skipif(native() is None, reason="the native compressor was not built")
SMALLEST = replace(LEVELS["fast"], primed=False)  # priming takes the reference a minute
PROSE = b"It was a dark and stormy night; the rain fell in torrents. " * 3


def options(length, contexts=24, table_bits=10, hidden=16, window=5, lanes=3):
    return Options(length, contexts, table_bits, hidden, window, lanes, **TINY)


def encoded(engine, data, pieces=1):
    cuts = [len(data) * i // pieces for i in range(pieces + 1)]
    return b"".join(engine.encode(data[a:b], b == len(data)) for a, b in itertools.pairwise(cuts))


def packed(tmp_path, data, **how):
    (tmp_path / "in").write_bytes(data)
    compression.compress(tmp_path / "in", tmp_path / "packed", **how)
    return (tmp_path / "packed").read_bytes()


# ---------------------------------------------------------------------- the same bits


SMALL = {
    "prose": b"the rain, the rain fell; the rain, the rain fell.",
    "binary": bytes(range(0, 256, 6)),
    "noise": random.Random(1).randbytes(30),
    "zeros": bytes(40),
    "ones": bytes([255]) * 20,  # low stays 0: the code ends in zeros that nobody writes
    "words": "naïve — «文字» naïve — ".encode(),
    "lines": b"a,12;b\nc,34;d\na,13;b\n\nc,35;d",
    "one": b"x",
}


@built
@pytest.mark.parametrize("data", SMALL.values(), ids=SMALL)
def test_native_code_is_the_reference_bit_for_bit(data):
    o = options(len(data))
    plain = encoded(Plain(o, None), data)
    for variant in (PORTABLE, AVX2, AVX512):
        assert encoded(Native(native(), o, None, variant), data) == plain
    assert Native(native(), o, None).decode(plain, len(data), True)[0] == data
    if len(data) < 40:
        assert Plain(o, None).decode(plain, len(data), True)[0] == data


@built
@pytest.mark.parametrize(
    "changes",
    [
        {"contexts": 3, "lanes": 1},
        {"contexts": 16, "hidden": 48, "window": 3},
        {"table_bits": 8, "window": 20},
    ],
    ids=str,
)
def test_whatever_the_options(changes):
    o = options(40, **changes)
    assert encoded(Native(native(), o, None), PROSE[:40]) == encoded(Plain(o, None), PROSE[:40])


@built
def test_the_odds_of_every_bit_are_the_references():
    """A code shows few of their 24 bits: here are rows with columns, words, and a long match."""
    rows = "".join(f"{i * i},{i:02};naïve Row {i % 3}\t{i}\n" for i in range(4)).encode()
    data = rows + 2 * b"The Time Traveller (for so it will be convenient to speak of him) was "
    o = options(len(data))
    assert np.array_equal(Native(native(), o, None).predict(data), Plain(o, None).predict(data))


@built
def test_instruction_sets_agree_on_a_longer_text_and_so_do_pieces():
    words = b"the time traveller for so it will be convenient to speak of him".split()
    data = b" ".join(random.Random(0).choices(words, k=1200))
    o = options(len(data), table_bits=14, hidden=64, window=16, lanes=2)
    first = encoded(Native(native(), o, None, PORTABLE), data)
    assert len(first) < len(data) / 3
    for variant in (AVX2, AVX512):
        assert encoded(Native(native(), o, None, variant), data, pieces=7) == first


@built
def test_what_both_sides_have_read_before_they_begin_helps_and_is_the_same_everywhere():
    o, page, text = options(20), PROSE[:30], PROSE[10:30]
    plain = Plain(o, None)
    plain.prime(page)
    found = encoded(plain, text)
    assert len(found) < len(encoded(Native(native(), o, None), text))
    for variant in (PORTABLE, AVX2, AVX512):
        engine = Native(native(), o, None, variant)
        engine.prime(page)
        assert encoded(engine, text) == found


def test_the_primer_belongs_to_the_version():
    """Files of this version decode with this primer and no other."""
    assert container.VERSION == 2
    assert hashlib.sha256(PRIMER).hexdigest()[:16] == "1ada487bce72a406"


@built
def test_a_thread_that_flushes_subnormals_computes_the_same():
    o = options(len(PROSE))
    before = encoded(Native(native(), o, None), PROSE)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush")
    try:
        assert encoded(Native(native(), o, None), PROSE) == before
    finally:
        torch.set_flush_denormal(False)


@built
@pytest.mark.slow
@pytest.mark.skipif(
    not (shutil.which("aarch64-linux-gnu-g++") and shutil.which("qemu-aarch64-static")),
    reason="needs a compiler for arm64 (g++-aarch64-linux-gnu) and qemu-user-static",
)
def test_an_arm_processor_computes_the_same(tmp_path):
    """Built for arm64 and run instruction by instruction: the same bytes as here."""
    text = PROSE * 4 + bytes(range(256)) + random.Random(7).randbytes(300) + b"1,2;3\n4,5;6\n" * 9
    sources = [Path(__file__).with_name("compressor.cpp")]
    sources += [Path(library.__file__).with_name(f"{name}.cpp") for name in ("portable", "library")]
    flags = ["-std=c++17", "-O2", "-ffp-contract=off", "-fno-fast-math", "-Wno-psabi", "-static"]
    program, source, coded = (tmp_path / name for name in ("program", "text", "coded"))
    source.write_bytes(text)
    compiler = ["aarch64-linux-gnu-g++", *flags, *map(str, sources), "-o", str(program)]
    subprocess.run(compiler, check=True, timeout=600)
    run = ["qemu-aarch64-static", str(program), str(source), str(coded)]
    subprocess.run(run, check=True, timeout=600)
    ours = Native(native(), options(len(text)), None)
    ours.prime(text[:100])
    assert encoded(ours, text) == coded.read_bytes()


def test_the_functions_are_what_they_are_called():
    x = np.linspace(-20, 20, 4001).astype(np.float32)
    eps = np.finfo(np.float32).eps
    np.testing.assert_allclose(reference.exp(x), np.exp(x.astype("f8")), rtol=4 * eps)
    np.testing.assert_allclose(reference.tanh(x), np.tanh(x.astype("f8")), atol=4 * eps)
    p = np.linspace(0.001, 0.999, 999).astype(np.float32)
    expected = np.log(p.astype("f8") / (1 - p.astype("f8")))
    np.testing.assert_allclose(reference.stretch(p), expected, rtol=1e-5, atol=1e-6)


def test_the_network_learns_by_the_gradient_of_autograd():
    """One window of the reference against float64 autograd, before Adam scales it."""
    o = options(100, window=6, lanes=1)
    net, data = reference.Network(o, None), b"abcabd!"
    W_x, W_h, W_o, b_o = (
        torch.tensor(w.astype("f8"), requires_grad=True) for w in net._views(net.weights)
    )
    for byte in data:
        if len(net.lanes[0].steps) == o.window:
            net.lanes[0].out.append(byte)
            break
        net.read(byte, bytearray(), 0xFFFF)
    net.backward(net.lanes[0])
    h = c = torch.zeros(16, dtype=torch.float64)
    nats = torch.zeros((), dtype=torch.float64)
    for byte, following in itertools.pairwise(data):
        i, f, g, u = (W_x[byte] + h @ W_h).view(4, 16)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(u) * torch.tanh(c)
        nats = nats - (h @ W_o + b_o).log_softmax(-1)[following]
    nats.backward()
    for found, w in zip(net._views(net.gradient), (W_x, W_h, W_o, b_o), strict=True):
        assert w.grad.abs().max() > 1e-3, "living"
        np.testing.assert_allclose(found, w.grad.numpy(), atol=2e-6)


# ---------------------------------------------------------------------- files


@pytest.mark.parametrize("size", [0, 1, 2, 5])
def test_the_shortest_files(tmp_path, size, monkeypatch):
    monkeypatch.setitem(LEVELS, "default", SMALLEST)
    data = b"elman"[:size]
    packed(tmp_path, data)
    compression.decompress(tmp_path / "packed", tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == data


@built
@pytest.mark.parametrize("level", LEVELS)
def test_any_bytes_come_back_at_every_level(tmp_path, level):
    data = PROSE * 4 + random.Random(2).randbytes(500) + bytes(1000) + PROSE
    found = packed(tmp_path, data, level=level)
    assert len(found) < 1000
    told = []
    compression.decompress(
        tmp_path / "packed", tmp_path / "out", progress=lambda *p: told.append(p)
    )
    assert (tmp_path / "out").read_bytes() == data
    assert told[-1][0] == len(data)


@built
def test_without_native_code_the_file_is_the_same(tmp_path, monkeypatch):
    monkeypatch.setitem(LEVELS, "default", SMALLEST)
    ours = packed(tmp_path, PROSE[:20])
    library.found.cache_clear()
    monkeypatch.setenv("ELMAN_KERNELS", "reference")
    try:
        assert native() is None
        assert packed(tmp_path, PROSE[:20]) == ours
        compression.decompress(tmp_path / "packed", tmp_path / "out")
    finally:
        monkeypatch.delenv("ELMAN_KERNELS")
        library.found.cache_clear()
    assert (tmp_path / "out").read_bytes() == PROSE[:20]


def mutated(whole: bytes, other: bytes, chance: random.Random) -> bytes:
    """A file that is not what it was: damaged, cut, or put together from others."""
    at = chance.randrange(len(whole))
    match chance.randrange(9):
        case 0:
            return whole[:at] + bytes([whole[at] ^ 1 << chance.randrange(8)]) + whole[at + 1 :]
        case 1:
            return whole[:at]
        case 2:
            return whole[:at] + chance.randbytes(chance.randrange(1, 20)) + whole[at:]
        case 3:
            return whole[:at] + whole[at + chance.randrange(1, 20) :]
        case 4:
            return whole[:at] + bytes(b ^ 0x5A for b in whole[at : at + 4]) + whole[at + 4 :]
        case 5:
            return whole[len(whole) // 2 :] + whole[: len(whole) // 2]
        case 6:
            return whole + other
        case 7:
            return other[:20] + whole[20:]
        case _:
            return whole[:4] + bytes([chance.choice([0, 1, 3, 255])]) + whole[5:]


def test_two_hundred_mutations_are_two_hundred_refusals(tmp_path, monkeypatch):
    monkeypatch.setitem(LEVELS, "default", SMALLEST)
    files = [packed(tmp_path, PROSE[:120]), packed(tmp_path, random.Random(4).randbytes(99))]
    chance, refused = random.Random(3), 0
    for _ in range(200):
        whole, other = chance.sample(files, 2)
        (tmp_path / "bad").write_bytes(mutated(whole, other, chance))
        with pytest.raises(UserError):
            compression.decompress(tmp_path / "bad", tmp_path / "out")
        assert not (tmp_path / "out").exists()
        refused += 1
    assert refused == 200
    assert not list(tmp_path.glob(".*partial"))


@built
@pytest.mark.parametrize("size", [0, 1, 300, 10_000])
def test_what_no_model_makes_shorter_is_stored_and_grows_by_the_header(tmp_path, size):
    noise = random.Random(size).randbytes(size)
    found = packed(tmp_path, noise, level="fast")
    stored = Header(size, None).bytes()
    assert len(stored) <= 8
    assert found[: len(stored)] == stored
    assert len(found) <= len(stored) + size + 16
    compression.decompress(tmp_path / "packed", tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == noise


def sealed(body: bytes) -> bytes:
    return body + hashlib.sha256(body).digest()[:8]


def test_a_file_with_a_true_seal_that_decodes_to_something_else_is_not_written(
    tmp_path, monkeypatch
):
    monkeypatch.setitem(LEVELS, "default", SMALLEST)
    whole = packed(tmp_path, PROSE[:60])
    forged = bytearray(whole[:-8])
    forged[-12] ^= 1  # of the coded text
    (tmp_path / "forged").write_bytes(sealed(bytes(forged)))
    with pytest.raises(UserError, match="does not decode to what it was made from"):
        compression.decompress(tmp_path / "forged", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def forged(whole: bytes, length: int) -> bytes:
    """The same file with another length in its header, and a true seal."""
    end = next(i for i in range(6, len(whole)) if whole[i] < 128)  # of the length
    return sealed(whole[:6] + container._varint(length) + whole[end + 1 : -8])


@built
@pytest.mark.parametrize("more", [2000, 10**6, 10**8, 2**40])
def test_a_forged_length_is_refused_where_the_code_ends_or_before(tmp_path, more):
    """As long as its length says, decoding 2^40 bytes would take a month."""
    whole = packed(tmp_path, b"\xff" * 3000, level="fast")
    (tmp_path / "forged").write_bytes(forged(whole, 3000 + more))
    told, how = [], "that ends after" if more < 2**40 else "of .* which hold no such text"
    with pytest.raises(UserError, match=rf"text of {3000 + more:,} bytes and has a code {how}"):
        compression.decompress(
            tmp_path / "forged", tmp_path / "out", progress=lambda *p: told.append(p)
        )
    assert not (tmp_path / "out").exists()
    assert len(told) <= 10, "pieces of 4,096 bytes"


@built
def test_a_text_ends_where_its_code_does_and_never_before():
    chance = random.Random(8)
    for size in range(1, 60):
        for data in (bytes(size), b"\xff" * size, PROSE[:size], chance.randbytes(size)):
            o = options(size, contexts=3, lanes=1)
            code = encoded(Native(native(), o, None), data)
            assert Native(native(), o, None).decode(code, size, True) == (data, len(code))
    o = options(9, contexts=3, lanes=1)
    native_end, plain_end = (
        engine.decode(b"", 400, True) for engine in (Native(native(), o, None), Plain(o, None))
    )
    assert native_end == plain_end
    assert 1 <= len(native_end[0]) < 400


def test_no_bit_is_free_so_that_a_code_of_some_size_holds_a_text_of_some_size():
    """`MOST_TEXT`: the interval's numbers, S of them, become S (1 - 2^-24 + 2^-48) at most."""
    coder, chance = reference.Coder(options(9, contexts=1, lanes=1)), random.Random(5)
    most = 1 - Fraction(1, 1 << 24) + Fraction(1, 1 << 48)
    for _ in range(4000):
        size = chance.randrange(1, 1 << chance.randrange(1, 65))
        low = chance.randrange(1 << 64) >> chance.choice([0, 0, 8, 40])
        high = min(low + size, coder.FULL)
        if (low ^ high) >> 56 == 0:
            continue  # the coder would have let go of a byte
        for bit, odds in itertools.product((0, 1), (1, 2, 1 << 23, (1 << 24) - 1)):
            coder.low, coder.high, gone = low, high, bytearray()
            coder.model.odds = lambda odds=odds: odds
            coder.model.see = lambda bit: None
            coder._narrow(bit, gone)
            after = Fraction(coder.high - coder.low + 1, 256 ** len(gone))
            assert 0 < after <= (high - low + 1) * most
    bits = -math.log2(most)
    assert 8 / (8 * bits) < container.MOST_TEXT


@built
def test_a_long_run_of_one_byte_comes_back(tmp_path):
    whole = packed(tmp_path, bytes(300_000), level="fast")
    assert len(whole) < 300
    compression.decompress(tmp_path / "packed", tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == bytes(300_000)


@built
@pytest.mark.parametrize("letters", [b"abcd", bytes(range(256))], ids=["coded", "stored"])
def test_a_file_that_is_cut_while_it_is_read_is_refused(tmp_path, letters):
    """Whoever writes it anew meanwhile: reading on would wait for the rest for ever."""
    data = bytes(random.Random(6).choices(letters, k=60_000))
    assert len(packed(tmp_path, data, level="fast")) > 12_000, "more than is read at once"

    def cut(done, read):
        os.truncate(tmp_path / "packed", 100)

    with pytest.raises(UserError, match=r"packed became shorter while it was read"):
        compression.decompress(tmp_path / "packed", tmp_path / "out", progress=cut)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"PK\x03\x04 something else entirely", "not a file that elman compressed"),
        (b"", "not a file that elman compressed"),
        (container.MAGIC + b"\x09" + bytes(40), "version 9"),
        (container.MAGIC + b"\x01" + bytes(40), "version 1, or damaged; this elman reads 2"),
        (sealed(container.MAGIC + bytes([2, 8]) + bytes(30)), "damaged"),
        (sealed(container.MAGIC + bytes([2, 5, 3]) + b"abc" + bytes(8)), "damaged"),
        (sealed(container.MAGIC + bytes([2, 4, 9]) + b"abc" + bytes(8)), "damaged"),
        (sealed(container.MAGIC + bytes([2, 0, 5, 99]) + bytes(30)), "contexts=99 must be 1 to 24"),
        (sealed(container.MAGIC + b"\x02\x00\x09\x13\x01" + b"\xff" * 5), "damaged"),
        (sealed(container.MAGIC + b"\x02\x00" + b"\xff" * 40), "damaged|must be"),
    ],
)
def test_foreign_files_are_refused(tmp_path, body, message):
    (tmp_path / "file").write_bytes(body)
    with pytest.raises(UserError, match=message):
        compression.decompress(tmp_path / "file", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_header_comes_back(tmp_path):
    long = replace(options(2**40, hidden=160), primed=True)
    code = bytes(2**16)  # a text of 2^40 bytes is never shorter
    for header in (Header(300, options(300)), Header(2**40, long, bytes(range(16)))):
        (tmp_path / "file").write_bytes(sealed(header.bytes() + code + bytes(8)))
        with open(tmp_path / "file", "rb") as file:
            found, start, end = container._checked(file, "file")
        assert found == header
        assert (start, end - start) == (len(header.bytes()), len(code))


def test_options_have_their_limits():
    for wrong in ({"hidden": 24}, {"lanes": 65}, {"table_bits": 30}, {"contexts": 0}):
        with pytest.raises(UserError, match=f"{next(iter(wrong))}="):
            options(10, **wrong)
    assert LEVELS["best"].options(10**9).table_bits == 22
    assert replace(LEVELS["best"], primed=False).options(0).table_bits == 10
    assert LEVELS["best"].options(0).table_bits == 16, "the primer has to fit"
    assert replace(LEVELS["best"], primed=False).options(5000).table_bits == 16
    assert LEVELS["best"].options(5000).table_bits == 17, "the primer and the text have to fit"


@pytest.mark.parametrize("hidden", [16, 48])
def test_the_options_know_how_many_weights_there_are(hidden):
    o = options(10, hidden=hidden)
    assert Network(o, None).weights.size == o.weights


# ---------------------------------------------------------------------- from a run


@pytest.fixture
def lstm(tiny_run):
    return tiny_run("--model", "lstm")


@built
def test_a_run_is_a_head_start_and_is_asked_for_by_its_fingerprint(
    tmp_path, lstm, tiny_run, monkeypatch
):
    monkeypatch.setitem(LEVELS, "default", replace(LEVELS["default"], primed=False))
    text = (lstm.parent / "book.txt").read_bytes()[:600]
    alone, helped = len(packed(tmp_path, text)), len(packed(tmp_path, text, run=lstm))
    assert helped < alone - 8
    with pytest.raises(
        UserError, match=r"starts from a trained run, whose fingerprint is [0-9a-f]"
    ):
        compression.decompress(tmp_path / "packed", tmp_path / "out")
    other = tiny_run("--model", "lstm", "--seed", "5")
    with pytest.raises(UserError, match="is not the run that"):
        compression.decompress(tmp_path / "packed", tmp_path / "out", run=other)
    assert not (tmp_path / "out").exists()
    compression.decompress(tmp_path / "packed", tmp_path / "out", run=lstm)
    assert (tmp_path / "out").read_bytes() == text
    packed(tmp_path, text)
    with pytest.raises(UserError, match="does not start from a run"):
        compression.decompress(tmp_path / "packed", tmp_path / "out2", run=lstm)


@built
def test_what_no_run_makes_shorter_comes_back_with_the_run_or_without(tmp_path, lstm, capsys):
    (tmp_path / "noise").write_bytes(random.Random(3).randbytes(50))
    assert cli(["compress", str(tmp_path / "noise"), "--run", str(lstm)]) == 0
    said = capsys.readouterr().err
    assert "--run" not in said, "the way back that is named needs no run"
    for i, way in enumerate((["--run", str(lstm)], [])):
        back = tmp_path / f"back{i}"
        assert cli(["decompress", str(tmp_path / "noise.elm"), "-o", str(back), *way]) == 0
        assert back.read_bytes() == (tmp_path / "noise").read_bytes()


@built
def test_the_way_back_that_is_named_works_as_it_stands(tmp_path, lstm, capsys):
    (tmp_path / "a book.txt").write_bytes(PROSE)
    for out in ([], ["-o", str(tmp_path / "packed")]):
        assert cli(["compress", str(tmp_path / "a book.txt"), "--run", str(lstm), *out]) == 0
        command = capsys.readouterr().err.split("next: elman ")[1]
        assert cli(shlex.split(command)) == 0
    assert (tmp_path / "a book.again.txt").read_bytes() == PROSE
    assert (tmp_path / "packed.again").read_bytes() == PROSE


@built
def test_pipes_all_the_way(tmp_path):
    elman = [sys.executable, "-m", "elman"]
    there = subprocess.run(
        [*elman, "compress", "-", "-o", "-"], input=PROSE, capture_output=True, check=True
    )
    assert b"bits per byte" in there.stderr
    (tmp_path / "out").write_bytes(b"longer than what is to come, " * 99)
    with open(tmp_path / "out", "wb") as out:  # as a shell does it
        subprocess.run(
            [*elman, "decompress", "-", "-o", "-"], input=there.stdout, stdout=out, check=True
        )
    assert (tmp_path / "out").read_bytes() == PROSE


def test_what_came_through_a_pipe_is_called_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"no such file")))
    assert cli(["decompress", "-", "-o", str(tmp_path / "out")]) == 2
    assert "error: stdin is not a file that elman compressed" in capsys.readouterr().err


def test_the_run_predicts_in_the_compressor_what_it_predicts_itself(lstm):
    run = Run.open(lstm)
    weights, hidden = network_of(lstm)
    assert hidden == 32  # 24, padded
    net = reference.Network(options(1000, hidden=hidden, window=50, lanes=1), weights)
    text = "it is the time of the end, the time"
    ids = torch.as_tensor(run.vocab.encode(text)).long()[None]
    with torch.no_grad():
        logits, _ = run.load_model()(ids)
    ascii_only = [i for i, token in enumerate(run.vocab.idx_to_token) if token.isascii()]
    expected = logits[0].softmax(-1).numpy()
    expected /= expected[:, ascii_only].sum(-1, keepdims=True)  # <unk> is among them
    p = np.zeros(256, np.float32)
    for t, byte in enumerate(text.encode()):
        p = net.read(byte, bytearray(), 0xFFFF)
        for character in "e tx\n":
            if character in run.vocab:
                theirs = expected[t, run.vocab[character]]
                assert p[ord(character)] == pytest.approx(theirs, rel=1e-3, abs=1e-6)
    assert p.sum() == pytest.approx(1, abs=1e-5)
    unknown = [b for b in range(256) if b > 127 or chr(b) not in run.vocab]
    assert p[unknown].sum() == pytest.approx(expected[-1, 0], rel=1e-3)


@pytest.mark.parametrize("how", [("--model", "gru"), ("--model", "lstm", "--layers", "2")])
def test_runs_that_do_not_fit_are_refused(tiny_run, how):
    with pytest.raises(UserError, match="starts from one lstm layer"):
        network_of(tiny_run(*how))
    with pytest.raises(UserError, match="words, which are not bytes"):
        network_of(tiny_run(level="word"))


# ---------------------------------------------------------------------- the command line


@built
def test_the_command_line_goes_there_and_back(tmp_path, capsys, monkeypatch):
    book = tmp_path / "book.txt"
    book.write_bytes(PROSE * 9)
    assert cli(["compress", str(book), "--level", "fast", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["original_bytes"] == len(PROSE) * 9
    assert found["compressed_bytes"] == os.path.getsize(tmp_path / "book.txt.elm")
    assert cli(["compress", str(book)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert cli(["decompress", f"{book}.elm", "-o", str(tmp_path / "back")]) == 0
    assert (tmp_path / "back").read_bytes() == book.read_bytes()
    pipe = io.TextIOWrapper(io.BytesIO(PROSE))
    monkeypatch.setattr("sys.stdin", pipe)
    assert cli(["compress", "-", "-o", str(tmp_path / "piped.elm")]) == 0
    assert cli(["decompress", str(tmp_path / "piped.elm")]) == 0
    assert (tmp_path / "piped").read_bytes() == PROSE
    assert "bits per byte" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["compress", "{}/none"], "there is no file"),
        (["compress", "{}"], "is a folder"),
        (["compress", "{}/book", "--level", "worst"], "unknown level 'worst'"),
        (["compress", "-"], "has no name"),
        (["decompress", "-"], "has no name"),
        (["compress", "{}/book", "-o", "-", "--json"], "would go to stdout"),
        (["compress", "{}/book", "-o", "{}/no/where"], "there is no folder"),
        (["decompress", "{}/book"], "does not end in .elm"),
        (["decompress", "{}/book", "-o", "{}/x"], "not a file that elman compressed"),
        (["compress", "{}/book", "--run", "{}"], "not a run folder"),
    ],
)
def test_what_cannot_be_done_is_said(tmp_path, capsys, words, message):
    (tmp_path / "book").write_bytes(b"some text")
    assert cli([word.replace("{}", str(tmp_path)) for word in words]) == 2
    assert message in capsys.readouterr().err


def test_what_has_no_size_before_it_is_read_is_compressed_whole(tmp_path):
    """A pipe says that it has 0 bytes: its contents were thrown away, with exit status 0."""
    pipe, packed, back = tmp_path / "pipe", tmp_path / "packed", tmp_path / "back"
    os.mkfifo(pipe)
    text = b"the cat sat on the mat. " * 20
    writer = threading.Thread(target=pipe.write_bytes, args=(text,))
    writer.start()
    assert compression.compress(pipe, packed, "fast").original == len(text)
    writer.join()
    compression.decompress(packed, back)
    assert back.read_bytes() == text
    writer = threading.Thread(target=pipe.write_bytes, args=(packed.read_bytes(),))
    writer.start()
    compression.decompress(pipe, tmp_path / "again")
    writer.join()
    assert (tmp_path / "again").read_bytes() == text


def test_a_device_without_end_is_refused(tmp_path):
    with pytest.raises(UserError, match="/dev/zero is a device, which has no end"):
        compression.compress("/dev/zero", tmp_path / "packed")
