"""`--where`: which rows, in an expression over columns. Parsed, never executed.

finish_reason == "stop" and usage.completion_tokens > 20
level in [1, 2] or not (answer is None)
`a column's odd name` > "2026-01-31"    # times, dates and decimals are compared with their texts
"""

from __future__ import annotations

import ast
import datetime
import decimal
import operator
import re
from collections.abc import Callable
from functools import reduce
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

_STAND_IN = "__quoted_name_"
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


# A text stays as it is; a name between backticks may stand inside none.
_QUOTED = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|`([^`]*)`""")
_UNFIT = (pa.ArrowException, OverflowError, TypeError, ArithmeticError)


class Where:
    """A filter over tables of one schema; ValueError names what it does not understand."""

    def __init__(self, text: str, schema: pa.Schema) -> None:
        self._text = text
        self._schema = schema
        self._names: dict[str, str] = {}
        try:
            tree = ast.parse(_QUOTED.sub(self._stand_in, text).strip(), mode="eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            why = error.msg if isinstance(error, SyntaxError) else str(error)
            raise ValueError(f"--where: cannot be read: {text[:200]!r} ({why})") from None
        try:
            self._expression = self._made(tree.body)
        except _UNFIT as error:
            raise self._unfit(error) from None
        except RecursionError:
            raise ValueError(f"--where: nested too deeply: {text[:200]!r}") from None
        self.filter(schema.empty_table())

    def filter(self, table: pa.Table) -> pa.Table:
        try:
            return table.filter(self._expression)
        except _UNFIT as error:
            raise self._unfit(error) from None

    def _unfit(self, error: BaseException) -> ValueError:
        return ValueError(f"--where: {self._text[:200]!r}: {str(error)[:200]}")

    def _stand_in(self, match: re.Match[str]) -> str:
        """A name that Python reads, in the place of one between backticks."""
        if match[1] is None:
            return match[0]
        stand_in = f"{_STAND_IN}{len(self._names)}"
        self._names[stand_in] = match[1]
        return stand_in

    def _named(self, name: str) -> str:
        return self._names.get(name, name)

    def _made(self, node: ast.expr) -> pc.Expression:
        if isinstance(node, ast.BoolOp):
            join = operator.and_ if isinstance(node.op, ast.And) else operator.or_
            return reduce(join, map(self._made, node.values))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return ~self._made(node.operand)
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return self._compared(node.left, node.ops[0], node.comparators[0])
        if isinstance(node, ast.Name | ast.Attribute):
            return self._column(node)
        raise self._wrong(node)

    def _compared(self, left: ast.expr, how: ast.cmpop, right: ast.expr) -> pc.Expression:
        if isinstance(how, ast.Is | ast.IsNot):
            if not (isinstance(right, ast.Constant) and right.value is None):
                raise self._wrong(right)
            is_null = self._value(left).is_null()
            return is_null if isinstance(how, ast.Is) else ~is_null
        if isinstance(how, ast.In | ast.NotIn):
            if not isinstance(right, ast.List | ast.Tuple):
                raise self._wrong(right)
            kind = self._kind(left)
            inside = self._value(left).isin([self._typed(each, kind) for each in right.elts])
            return inside if isinstance(how, ast.In) else ~inside
        if type(how) not in _COMPARE:
            raise self._wrong(left)
        one = self._value(left, self._kind(right))
        return _COMPARE[type(how)](one, self._value(right, self._kind(left)))

    def _value(self, node: ast.expr, other: pa.DataType | None = None) -> pc.Expression:
        """A column, or a constant beside a value of the type `other`."""
        if isinstance(node, ast.Name | ast.Attribute):
            return self._column(node)
        return pc.scalar(self._typed(node, other))

    def _kind(self, node: ast.expr) -> pa.DataType | None:
        """The type of a column; None for anything else."""
        if not isinstance(node, ast.Name | ast.Attribute):
            return None
        return self._found(node)[1]

    def _typed(self, node: ast.expr, kind: pa.DataType | None) -> Any:
        """A constant as a value of the column that it is compared with."""
        value = self._constant(node)
        if kind is None or isinstance(value, bool):
            return value
        try:
            if pa.types.is_uint64(kind) and isinstance(value, int) and value >= 2**63:
                return pa.scalar(value, kind)
            if pa.types.is_decimal(kind) and isinstance(value, int | float):
                return decimal.Decimal(str(value))
            if pa.types.is_date(kind) and isinstance(value, str):
                return datetime.date.fromisoformat(value)
            if pa.types.is_timestamp(kind) and isinstance(value, str):
                return _time(value, kind)
        except ValueError as error:
            raise ValueError(f"--where: {value!r} is no {kind}: {error}") from None
        return value

    def _constant(self, node: ast.expr) -> Any:
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = self._constant(node.operand)
            if isinstance(value, int | float):
                return -value
        if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float):
            return node.value
        raise self._wrong(node)

    def _column(self, node: ast.expr) -> pc.Expression:
        path, _ = self._found(node)
        return pc.field(*path)

    def _found(self, node: ast.expr) -> tuple[list[str], pa.DataType]:
        """(the names from a column down to a field of it, its type)."""
        path: list[str] = []
        while isinstance(node, ast.Attribute):
            path.insert(0, self._named(node.attr))
            node = node.value
        if not isinstance(node, ast.Name):
            raise self._wrong(node)
        kind: Any = None
        path.insert(0, self._named(node.id))
        for name in path:
            known = self._schema.names if kind is None else _fields(kind)
            if name not in known:
                listed = ", ".join(map(repr, known)) or "none"
                raise ValueError(f"--where: no column {name!r}; there are: {listed}")
            kind = (self._schema if kind is None else kind).field(name).type
        return path, kind

    def _wrong(self, node: ast.expr) -> ValueError:
        shown = self._text if self._names else ast.unparse(node)
        return ValueError(
            f"--where: {shown[:200]!r} is not understood; columns (`odd name` in backticks), "
            "comparisons, in, is None, and, or, not"
        )


def _time(text: str, kind: pa.DataType) -> pa.Scalar:
    """A moment in ISO 8601; of UTC where the column knows zones and the text names none."""
    moment = datetime.datetime.fromisoformat(text)
    if kind.tz is not None and moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    return pa.scalar(moment, pa.timestamp("us", kind.tz))


def _fields(kind: pa.DataType) -> list[str]:
    if not pa.types.is_struct(kind):
        return []
    return [kind.field(i).name for i in range(kind.num_fields)]
