"""Tables as programs write them, drawn at random: read as what they were written from, or refused.

The oracle is what was written: values in the order of time, and the time of the next step.
"""

import csv
import datetime as dt
import io

import pytest
from harness import cases

from elman.errors import UserError
from elman.forecasting import series, tables

pytestmark = pytest.mark.fuzz

START = dt.datetime(2019, 11, 4)
STEPS = {
    "hours": lambda k: START + dt.timedelta(hours=k),
    "days": lambda k: START + dt.timedelta(days=k),
    "weeks": lambda k: START + dt.timedelta(weeks=k),
    "months": lambda k: dt.datetime(2019 + k // 12, k % 12 + 1, 1),
}
DAYS = (
    "%Y-%m-%d", "%Y/%m/%d", "%d/%m/%Y", "%m/%d/%Y", "%d.%m.%Y", "%d.%m.%y", "%Y%m%d", "%d %b %Y",
    "%b %d, %Y", "%d-%b-%y", "%a %b %d %Y", "%Y-%m-%dT00:00:00Z", "%G-W%V-%u", "%Y-%j",
)  # fmt: skip
TIMES = {
    "hours": ("%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M:%SZ", "%Y-%m-%d %H:%M:%S UTC", "%d.%m.%Y %H:%M",
              "%m/%d/%Y %I:%M %p", "%b %d, %Y %I:%M %p", "%Y%m%dT%H%M%S", "%Y-%m-%d %H:%M:%S CET"),
    "days": DAYS, "weeks": (*DAYS, "%G-W%V"),
    "months": (*DAYS, "%Y-%m", "%b %Y", "%Y%m", "%m.%Y", "%m/%Y", "%b-%y"),
}  # fmt: skip
NUMBERS = (
    lambda v: f"{v:.2f}", lambda v: f"{v:,.2f}", lambda v: f"{v:.6e}", lambda v: f"${v:,.2f}",
    lambda v: f"{v:.2f}".replace(".", ","), lambda v: f"{v:.1f}%",
    lambda v: f"{v:,.2f} €".translate(str.maketrans(",.", ".,")),
)  # fmt: skip


def test_a_table_is_what_it_was_written_from_or_refused():
    read = refused = 0
    for chance in cases(60):
        beat, steps = chance.choice(list(STEPS)), chance.choice([14, 40])
        style, number = chance.choice(TIMES[beat]), chance.choice(NUMBERS)
        values = [chance.randrange(100, 10**7) / 10 for _ in range(steps)]
        rows = [
            [STEPS[beat](k).strftime(style), number(v), f"w{k % 3}"] for k, v in enumerate(values)
        ]
        chance.choice([list, list.reverse, chance.shuffle])(rows)
        header = [chance.choice(["date", "Datum", "when", "日期"]), "sold, all", "note"]
        text = io.StringIO()
        end = chance.choice(["\n", "\r\n", "\r"])
        csv.writer(text, delimiter=chance.choice(",;\t|"), lineterminator=end).writerows(
            [header, *rows]
        )
        content = text.getvalue().encode(chance.choice(["utf-8", "utf-8-sig", "utf-16"]))
        try:
            [found] = series.from_table(tables.read_csv(content, "t", "t"), series.Reading())
        except UserError:  # whose words tests/test_broken_tables.py has
            refused += 1
            continue
        read += 1
        assert found.values[:, 0].tolist() == pytest.approx(values, rel=1e-6), (style, rows[0])
        assert found.clock is not None, (style, found.notes)
        after = found.clock.at(steps)
        assert isinstance(after, dt.datetime), style
        assert after.replace(tzinfo=None) == STEPS[beat](steps), style
    assert read + refused < 20 or read > refused / 3, "most of these can be read"
