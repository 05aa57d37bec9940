"""`--where`: which rows, in an expression over columns. Parsed, never executed.

finish_reason == "stop" and usage.completion_tokens > 20
level in [1, 2] or not (answer is None)
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


class Where:
    """A filter over tables of one schema; ValueError names what it does not understand."""

    def __init__(self, text: str, schema: pa.Schema) -> None:
        self._text = text
        self._schema = schema
        try:
            tree = ast.parse(text, mode="eval")
        except (SyntaxError, ValueError, RecursionError) as error:
            raise ValueError(f"--where: cannot be read: {text!r} ({error})") from None
        self._expression = self._made(tree.body)
        self.filter(schema.empty_table())

    def filter(self, table: pa.Table) -> pa.Table:
        try:
            return table.filter(self._expression)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
            raise ValueError(f"--where: {self._text!r}: {str(error)[:200]}") from None

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
            inside = self._value(left).isin([self._constant(each) for each in right.elts])
            return inside if isinstance(how, ast.In) else ~inside
        if type(how) not in _COMPARE:
            raise self._wrong(left)
        return _COMPARE[type(how)](self._value(left), self._value(right))

    def _value(self, node: ast.expr) -> pc.Expression:
        if isinstance(node, ast.Name | ast.Attribute):
            return self._column(node)
        return pc.scalar(self._constant(node))

    def _constant(self, node: ast.expr) -> Any:
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = self._constant(node.operand)
            if isinstance(value, int | float):
                return -value
        if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float):
            return node.value
        raise self._wrong(node)

    def _column(self, node: ast.expr) -> pc.Expression:
        path: list[str] = []
        while isinstance(node, ast.Attribute):
            path.insert(0, node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            raise self._wrong(node)
        kind: Any = None
        for name in (node.id, *path):
            known = self._schema.names if kind is None else _fields(kind)
            if name not in known:
                listed = ", ".join(map(repr, known)) or "none"
                raise ValueError(f"--where: no column {name!r}; there are: {listed}")
            kind = (self._schema if kind is None else kind).field(name).type
        return pc.field(node.id, *path) if path else pc.field(node.id)

    def _wrong(self, node: ast.expr) -> ValueError:
        shown = ast.get_source_segment(self._text, node) or self._text
        return ValueError(
            f"--where: {shown!r} is not understood; columns, comparisons, in, is None, and, or, not"
        )


def _fields(kind: pa.DataType) -> list[str]:
    if not pa.types.is_struct(kind):
        return []
    return [kind.field(i).name for i in range(kind.num_fields)]
