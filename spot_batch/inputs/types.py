"""Arrow types of the input: what is plain enough to pass through, and what text rows imply."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

MAX_DEPTH = 50  # of lists and objects in one another: Arrow's own readers stop at 64
MAX_FIELDS = 1_000  # of an object in all rows together: more are no fields but data

Converter = Callable[[Any], Any]


class Misfit(ValueError):
    """A value that its column cannot hold; the message says where in the column and why."""


# -- types of tables -------------------------------------------------------------------------------


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The type that readers of every kind hold: no dictionaries, views, runs or extensions.

    TypeError for a type that has none.
    """
    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return plain_type(kind.storage_type)
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return plain_type(kind.value_type)
    if types.is_string_view(kind):
        return pa.string()
    if types.is_binary_view(kind):
        return pa.binary()
    if types.is_struct(kind):
        return pa.struct([_plain_field(kind.field(i)) for i in range(kind.num_fields)])
    if types.is_map(kind):
        return pa.map_(plain_type(kind.key_type), plain_type(kind.item_type))
    if types.is_fixed_size_list(kind):
        return pa.list_(_plain_field(kind.value_field), kind.list_size)
    if types.is_large_list(kind) or types.is_large_list_view(kind):
        return pa.large_list(_plain_field(kind.value_field))
    if types.is_list(kind) or types.is_list_view(kind):
        return pa.list_(_plain_field(kind.value_field))
    if types.is_union(kind):
        raise TypeError("a union")
    return kind


def plain_column(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    """The column in its plain type, its values untouched."""
    if isinstance(column.type, pa.BaseExtensionType):
        chunks = [chunk.storage for chunk in column.chunks]
        column = pa.chunked_array(chunks, type=column.type.storage_type)
    if pa.types.is_run_end_encoded(column.type):
        column = pc.run_end_decode(column)
    if pa.types.is_dictionary(column.type):  # of views too, as polars writes them
        chunks = [chunk.dictionary.cast(kind).take(chunk.indices) for chunk in column.chunks]
        column = pa.chunked_array(chunks, type=kind)
    return column if column.type == kind else column.cast(kind)


def filled_type(kind: pa.DataType, other: pa.DataType) -> pa.DataType:
    """The type, with nulls at any depth replaced by what the other has there: a file whose rows
    lack a value does not know its type. Fields of a struct that only one has are added."""
    types = pa.types
    if types.is_null(kind):
        return other
    if types.is_struct(kind) and types.is_struct(other):
        theirs = {other.field(i).name: other.field(i) for i in range(other.num_fields)}
        mine = [kind.field(i) for i in range(kind.num_fields)]
        fields = [
            field.with_type(filled_type(field.type, theirs[field.name].type))
            if field.name in theirs
            else field.with_nullable(True)
            for field in mine
        ]
        names = {field.name for field in mine}
        fields += [theirs[name].with_nullable(True) for name in theirs if name not in names]
        return pa.struct(fields)
    if types.is_list(kind) and types.is_list(other):
        item = kind.value_field
        return pa.list_(item.with_type(filled_type(item.type, other.value_type)))
    if types.is_large_list(kind) and types.is_large_list(other):
        item = kind.value_field
        return pa.large_list(item.with_type(filled_type(item.type, other.value_type)))
    return kind


def depth_of(kind: pa.DataType) -> int:
    """How many lists, structs and maps stand in one another."""
    inside = [kind.field(i).type for i in range(kind.num_fields)]
    return 1 + max(map(depth_of, inside)) if inside else 0


def is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _plain_field(item: pa.Field) -> pa.Field:
    return pa.field(item.name, plain_type(item.type), nullable=item.nullable)


# -- types of text rows ----------------------------------------------------------------------------


@dataclass(slots=True)
class Shape:
    """What the values at one place of a column have been seen to be.

    The kind of most values decides, the first seen among equals; whole numbers are numbers where
    any other number is met. A value of another kind does not fit, and its row becomes an error row.
    """

    depth: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    item: Shape | None = None
    fields: dict[str, Shape] = field(default_factory=dict)
    has_many_keys: bool = False

    def observe(self, value: object) -> None:
        """Takes a value in."""
        if value is None or _is_beyond_64_bits(value):
            return
        self.counts[_KINDS[type(value)]] += 1
        if self.depth == MAX_DEPTH or self.has_many_keys:
            return
        if isinstance(value, list):
            self.item = self.item or Shape(self.depth + 1)
            for element in value:
                self.item.observe(element)
        elif isinstance(value, dict):
            for name, element in value.items():
                inner = self.fields.get(name)
                if inner is None:
                    inner = self.fields[name] = Shape(self.depth + 1)
                inner.observe(element)
            if len(self.fields) > MAX_FIELDS:
                self.has_many_keys = True
                self.fields.clear()

    @property
    def is_wide(self) -> bool:
        """Whether objects anywhere in it have so many keys that the keys are data."""
        inside = [*self.fields.values(), *([self.item] if self.item is not None else [])]
        return self.has_many_keys or any(each.is_wide for each in inside)

    @property
    def kind(self) -> str:
        counts = self.counts
        if "float" in counts and "int" in counts:
            counts = Counter({"float" if k == "int" else k: 0 for k in counts})
            for name, count in self.counts.items():
                counts["float" if name == "int" else name] += count
        return max(counts, key=counts.__getitem__, default="null")

    def to_arrow(self) -> pa.DataType:
        if self.depth == 0 and self.is_wide:
            return pa.string()
        if self.kind == "list":
            return pa.list_((self.item or Shape()).to_arrow())
        if self.kind == "struct":
            is_message = "role" in self.fields
            return pa.struct(
                [
                    (name, inner.parts() if name == "content" and is_message else inner.to_arrow())
                    for name, inner in self.fields.items()
                ]
            )
        return _ARROW[self.kind]

    def parts(self) -> pa.DataType:
        """The type of a message's content: a list of parts where some are texts, some such lists.

        A text says the same as one part of that text, so none of them need be an error.
        """
        if self.item is not None and {"string", "list"} <= self.counts.keys():
            of_item = self.item.to_arrow()
            if _is_part(of_item):
                return pa.list_(of_item)
        return self.to_arrow()


def as_json(value: Any) -> Any:
    """The JSON text of a value, for a column of objects whose keys are data."""
    return None if value is None else json.dumps(value, ensure_ascii=False)


def converter(kind: pa.DataType, where: str, *, depth: int = 0) -> Converter:
    """Turns a JSON value into one that Arrow takes as `kind`, or raises Misfit. Null stays null."""
    convert = _converter(kind, where, depth)
    return lambda value: None if value is None else convert(value)


def _converter(kind: pa.DataType, where: str, depth: int) -> Converter:
    types = pa.types
    if depth > MAX_DEPTH:
        return lambda value: _too_deep(where)
    if types.is_list(kind):
        of_item = converter(kind.value_type, f"{where}[]", depth=depth + 1)
        return lambda value: [of_item(each) for each in _instance(value, list, where)]
    if types.is_struct(kind):
        fields = [kind.field(i) for i in range(kind.num_fields)]
        of_field = {
            field.name: converter(field.type, f"{where}.{field.name}", depth=depth + 1)
            for field in fields
        }
        for field in fields:
            is_parts = pa.types.is_list(field.type) and _is_part(field.type.value_type)
            if is_parts and field.name == "content" and "role" in of_field:
                of_field["content"] = _in_parts(of_field["content"])
        if depth == MAX_DEPTH:
            return lambda value: _too_deep(where)
        return lambda value: _struct(value, of_field, where)
    if types.is_floating(kind):
        return lambda value: _float(value, where)
    if types.is_boolean(kind):
        return lambda value: _instance(value, bool, where)
    if types.is_integer(kind):
        return lambda value: _int(value, where)
    if types.is_null(kind):
        return lambda value: _null(value, where)
    return lambda value: _instance(value, str, where)


def _is_part(kind: pa.DataType) -> bool:
    """Whether it is the type of {type, text}, OpenAI's part of a message's content."""
    if not pa.types.is_struct(kind):
        return False
    types = {kind.field(i).name: kind.field(i).type for i in range(kind.num_fields)}
    return all(name in types and is_text(types[name]) for name in ("type", "text"))


def _in_parts(convert: Converter) -> Converter:
    def converted(value: Any) -> Any:
        if isinstance(value, str):
            value = [{"type": "text", "text": value}]
        return convert(value)

    return converted


def _too_deep(where: str) -> Any:
    shown = where if len(where) <= 60 else f"{where[:57]}..."
    raise Misfit(f"{shown} is nested more than {MAX_DEPTH} deep")


def _null(value: Any, where: str) -> Any:
    _check_64_bits(value, where)
    return _instance(value, type(None), where)


def _check_64_bits(value: object, where: str) -> None:
    if _is_beyond_64_bits(value):
        raise Misfit(f"{where} holds a whole number beyond 64 bits")


def _is_beyond_64_bits(value: object) -> bool:
    return isinstance(value, int) and not -(2**63) <= value < 2**63


def _instance(value: Any, kind: type, where: str) -> Any:
    if type(value) is not kind:
        raise Misfit(f"{where} is {_NOUNS[_KINDS[kind]]} in most rows, {_noun(value)} here")
    return value


def _int(value: Any, where: str) -> Any:
    _check_64_bits(value, where)
    return _instance(value, int, where)


def _float(value: Any, where: str) -> float:
    if type(value) is int:
        _check_64_bits(value, where)
        if int(float(value)) != value:
            raise Misfit(f"{where} is a number in other rows, which cannot hold {value} exactly")
        return float(value)
    return float(_instance(value, float, where))


def _struct(value: Any, of_field: dict[str, Converter], where: str) -> dict[str, object]:
    _instance(value, dict, where)
    for name in value:
        if name not in of_field:
            raise Misfit(f"{where} has a field {name!r} that no other row has")
    return {name: of_field[name](element) for name, element in value.items()}


def _noun(value: object) -> str:
    return _NOUNS[_KINDS[type(value)]]


_KINDS: dict[type, str] = {
    type(None): "null",
    bool: "bool",
    int: "int",
    float: "float",
    str: "string",
    list: "list",
    dict: "struct",
}
_NOUNS = {
    "null": "null",
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "string": "text",
    "list": "a list",
    "struct": "an object",
}
_ARROW = {
    "null": pa.null(),
    "bool": pa.bool_(),
    "int": pa.int64(),
    "float": pa.float64(),
    "string": pa.string(),
}
