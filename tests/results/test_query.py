"""`--where` over columns of every kind, and what is said where it means nothing."""

from __future__ import annotations

import datetime
import math
from decimal import Decimal

import pyarrow as pa
import pytest

from spot_batch.results.query import Filter

DAYS = [datetime.date(2026, 1, 1), datetime.date(2026, 2, 1), None]
TIMES = [datetime.datetime(2026, month, 1, tzinfo=datetime.UTC) for month in (1, 2, 3)]
TABLE = pa.table(
    {
        "n": [1, 2, 3],
        "a b": [1, 2, None],
        "from": ["x", "`", None],
        "exact": pa.array([Decimal("1.50"), Decimal("2.25"), None]),
        "when": pa.array(TIMES),
        "local": pa.array([each.replace(tzinfo=None) for each in TIMES], pa.timestamp("ns")),
        "day": pa.array(DAYS),
        "nested": [{"x y": 1}, {"x y": 2}, None],
        "seed": pa.array([1, 2**64 - 1, None], pa.uint64()),
        "small": pa.array([1, 255, None], pa.uint8()),
        "good": [True, False, None],
        "real": [0.5, math.nan, None],
        "map": pa.array([[("k", 1)], [], None], pa.map_(pa.string(), pa.int64())),
        "half": pa.array([1, 2, 3], pa.float16()),
        "Same": [1, 2, 3],
        "same": [3, 2, 1],
    }
)


@pytest.mark.parametrize(
    ("where", "rows"),
    [
        ('"a b" = 1', [1]),
        ("`a b` == 1", [1]),
        ("\"from\" = '`'", [2]),
        ('nested."x y" = 2', [2]),
        ("exact > 1.6", [2]),
        ("exact = 2.25", [2]),
        ("exact in (1.5, 7)", [1]),
        ("\"when\" >= '2026-01-15'", [2, 3]),
        ("'2026-02-01T01:00:00+01:00' = \"when\"", [2]),
        ("local = '2026-02-01'", [2]),
        ("day < '2026-01-15'", [1]),
        ("seed = 18446744073709551615", [2]),
        ("seed > -1", [1, 2]),
        ("small > 254", [2]),
        ("good", [1]),
        (" n == 2", [2]),
        ("n in [1, 3]", [1, 3]),
        ("n in []", []),
        # What is compared with a null is neither true nor false.
        ("good != true", [2]),
        ("not (good = true)", [2]),
        ("\"from\" != 'x' or seed = 1", [1, 2]),
        ('"from" is null', [3]),
        ("\"from\" not in ('x')", [2]),
        ("real > 0.1", [1, 2]),  # NaN is the greatest number, as in every SQL that sorts it
        ("map['k'] = 1", [1]),
        ('length("from") = 1 and n % 2 = 0', [2]),
    ],
)
def test_rows_are_taken_by_columns_of_every_kind(where: str, rows: list[int]) -> None:
    taken = Filter(where, TABLE.schema).apply(TABLE)
    assert taken["n"].to_pylist() == rows
    assert taken.schema.equals(TABLE.schema, check_metadata=True)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("n in [1, 'a']", "Could not convert string 'a'"),
        ("n = 'stop'", "Could not convert string 'stop'"),
        ("\"when\" > 'soon'", "soon"),
        ("day > '2026-13-01'", "2026-13-01"),
        ("no = 1", 'column "no" not found'),
        ('"from" = "stop"', r"column \"stop\" not found.*texts stand in ''"),
        ("a b = 1", "syntax error"),
        ("half > 1", r"column 'half' cannot be asked for \(DuckDB reads no halffloat\)"),
        ("same = 1", r"column 'same' cannot be asked for \(another column's name differs in case"),
        ("n = 1, n = 2", "single expression"),
        ("n = 1; drop table data", "Parser Error"),
        ("true) union select (1", "syntax error"),
        ("n > (select avg(n) from data)", "data does not exist"),
        ("exists (select * from read_text('/etc/hostname'))", "disabled by configuration"),
        ("count(*) > 1", "aggregates"),
        ("(" * 3_000 + "good" + ")" * 3_000, "expression depth"),
        ("\0", "--where"),
        ("", "--where"),
    ],
)
def test_what_means_nothing_is_said_in_one_line_of_the_option(where: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        Filter(where, TABLE.schema).apply(TABLE)
    assert str(caught.value).startswith("--where: ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
