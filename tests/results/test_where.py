"""`--where` over columns of every kind, and what is said where it means nothing."""

from __future__ import annotations

import datetime
from decimal import Decimal

import pyarrow as pa
import pytest

from spot_batch.results.where import Where

DAYS = [datetime.date(2026, 1, 1), datetime.date(2026, 2, 1)]
TIMES = [datetime.datetime(2026, month, 1, tzinfo=datetime.UTC) for month in (1, 2)]
TABLE = pa.table(
    {
        "a b": [1, 2],
        "from": ["x", "`"],
        "exact": pa.array([Decimal("1.50"), Decimal("2.25")]),
        "when": pa.array(TIMES),
        "local": pa.array([each.replace(tzinfo=None) for each in TIMES], pa.timestamp("ns")),
        "day": pa.array(DAYS),
        "n": [1, 2],
        "nested": [{"x y": 1}, {"x y": 2}],
        "seed": pa.array([1, 2**64 - 1], pa.uint64()),
        "good": [True, False],
    }
)


@pytest.mark.parametrize(
    ("where", "rows"),
    [
        ("`a b` == 1", [1]),
        ("`from` == '`'", [2]),
        ("nested.`x y` == 2", [2]),
        ("exact > 1.6", [2]),
        ("exact in [1.5, 7]", [1]),
        ("when >= '2026-01-15'", [2]),
        ("'2026-01-15T00:00:00+01:00' < when", [2]),
        ("when in ['2026-01-01']", [1]),
        ("local == '2026-02-01'", [2]),
        ("day < '2026-01-15'", [1]),
        ("seed == 18446744073709551615", [2]),
        ("good", [1]),
        (" n == 2", [2]),
        ("n in []", []),
    ],
)
def test_rows_are_taken_by_columns_of_every_kind(where: str, rows: list[int]) -> None:
    assert Where(where, TABLE.schema).filter(TABLE)["n"].to_pylist() == rows


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("n == 1" + "0" * 30, "too large"),
        ("n in [1, 99999999999999999999999]", "too large"),
        ("n in [1, 'a']", "Could not convert 'a'"),
        ("when > 'soon'", "'soon' is no timestamp"),
        ("when > 5", "no kernel"),
        ("day > '2026-13-01'", "'2026-13-01' is no date32"),
        ("exact > 'much'", "no kernel"),
        ("n", "must evaluate to bool"),
        ("`no` == 1", "no column 'no'"),
        ("a b == 1", "cannot be read"),
        ("__quoted_name_0 == 1", "no column '__quoted_name_0'"),
        ("`a b` + 1 == 2", r"`odd name` in backticks"),
        ("(" * 300 + "good" + ")" * 300, "cannot be read"),
        ("\0", "cannot be read"),
    ],
)
def test_what_means_nothing_is_said_in_one_line_of_the_option(where: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        Where(where, TABLE.schema)
    assert str(caught.value).startswith("--where: ")
    assert len(str(caught.value)) < 600
