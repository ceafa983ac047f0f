"""`elman forecast`: tables with something wrong in them, and options that nobody would type."""

import pytest
from harness import WORDS, cases, mutate_bytes, run_in_process

pytestmark = pytest.mark.fuzz

ROWS = [f"{t},{t % 7 + 0.5 * t},{(t * 13) % 11},{'ab'[t % 2]}" for t in range(60)]
HEADER = "time,x,y,which"
CELLS = (
    "", " ", "nan", "inf", "-inf", "1e300", "-1e300", "1e-320", "NA", "null", "0", "-0", "1,5",
    "x", "²", "٣", "\ufeff1", '"', '""', '"1\n2"', "1_000", "0x10", "2020-01-01", "2020-13-45",
    "9" * 400, "True", "1e5000", "\0", "12:00", "--1", "1 2", "€5", "5%",
)  # fmt: skip
METHODS = ("last", "seasonal", "mean", "drift", "linear", "ets", "window", "elman", "nonsense")
OPTIONS = (
    "--model", "--steps", "--column", "--time", "--group", "--known", "--past", "--static",
    "--fill", "--missing", "--date-format", "--timezone", "--season", "--tau", "--difference",
    "--hidden-size", "--epochs", "--learning-rate", "--level", "--windows", "--minutes", "--run",
    "--out", "--output", "--figure", "--seed",
)  # fmt: skip
FLAGS = ("--calendar", "--gaussian", "--force", "--json", "--help")


def table(chance) -> bytes:
    """A table with some cells, rows or bytes changed."""
    rows = [row.split(",") for row in (HEADER, *ROWS)]
    for _ in range(chance.choice([0, 1, 1, 2, 8])):
        row = chance.choice(rows)
        if row:
            row[chance.randrange(len(row))] = chance.choice(CELLS)
    if chance.random() < 0.2:
        at = chance.randrange(len(rows))
        rows[at] = chance.choice([[], [""], rows[at] * 2, rows[at][:1], rows[0]])
    end = chance.choice(["\n"] * 6 + ["\r\n", "\r", "\n\n"])
    data = end.join(chance.choice([",", ",", ",", ";", "\t"]).join(row) for row in rows).encode()
    return mutate_bytes(data, chance) if chance.random() < 0.3 else data


def test_tables(tmp_path):
    path = tmp_path / "table.csv"
    for chance in cases(25):
        data = table(chance)
        words = ["--column", chance.choice(["x", "y", "which"]), "--windows", "1", "--json"]
        words += ["--model", chance.choice(METHODS[:5]), "--steps", "3"]
        words += chance.choice([[], [], ["--time", "time"], ["--group", "which"]])
        path.write_bytes(data)
        if chance.random() < 0.2:
            run_in_process(["forecast", "-", *words], data)
        else:
            run_in_process(["forecast", str(path), *words])


def test_options(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "table.csv").write_text("\n".join([HEADER, *ROWS]) + "\n")
    small = ["--column", "x", "--windows", "1", "--steps", "2", "--minutes", "0.01", "--json"]
    small += ["--epochs", "1", "--hidden-size", "4"]
    for chance in cases(15):
        model = chance.choice(METHODS)
        quick = small if model in ("window", "elman") else small[:9]
        words = ["forecast", chance.choice(["table.csv"] * 8 + ["", "sine", *WORDS[:3]])]
        words += ["--model", model, *quick]
        for _ in range(chance.choice([0, 1, 1, 2])):
            values = (*WORDS, "x", "y", "time", "which", "linear", "80,95", "%Y", "UTC")
            words += [chance.choice(OPTIONS), chance.choice(values)]
        if chance.random() < 0.3:
            words.append(chance.choice(FLAGS))
        run_in_process(words)
