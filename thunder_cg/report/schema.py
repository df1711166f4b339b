"""The report as JSON, and the schema of that, in the words of the records' own comments.

A file is one object: ``format`` and ``version``, and the fields of `Report`. `schema` has all of them with their types
and meanings, as a JSON Schema (json-schema.org, draft 2020-12). A later version may add fields. `loads` ignores what it
does not know and takes the default of what is missing.
"""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from itertools import repeat
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

FORMAT, VERSION = "thunder_cg report", 1
MARK = f'{{\n "format": "{FORMAT}"'  # files begin with it

R = TypeVar("R")


def dumps(report: Any) -> str:
    """The content of a file."""
    return json.dumps({"format": FORMAT, "version": VERSION, **report.to_dict()}, indent=1, ensure_ascii=False) + "\n"


def plain(value: Any) -> Any:
    """Tuples as lists, so that what is written as JSON and read again is equal."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def loads(record: type[R], content: str, name: str) -> R:
    """The report in the content of a file of this name.

    Raises:
        ValueError: the file has something else, or a later version.
    """
    try:
        parsed = json.loads(content)
        if parsed["format"] != FORMAT or parsed["version"] > VERSION:
            raise ValueError(f"format {parsed['format']!r}, version {parsed['version']}")
        return _read(record, parsed)
    except (ValueError, KeyError, TypeError) as error:
        expected = f"a {FORMAT} of version {VERSION}, which report.save('....json') writes"
        raise ValueError(f"{name} is not {expected} ({error!r})") from None


def _read(kind: Any, value: Any) -> Any:
    """A value of a type, from what `json.loads` made of it. A union is of one type and None, or of plain values."""
    if is_dataclass(kind):
        assert isinstance(kind, type)
        hints = get_type_hints(kind)
        return kind(**{f.name: _read(hints[f.name], value[f.name]) for f in _needed(kind, value)})
    origin, inside = get_origin(kind), get_args(kind)
    if origin is tuple:
        kinds = repeat(inside[0]) if inside[-1] is Ellipsis else inside
        return tuple(_read(each, item) for each, item in zip(kinds, value))
    if origin is Mapping:
        return {key: _read(inside[1], item) for key, item in value.items()}
    if origin is types.UnionType and value is not None:
        return _read(next(each for each in inside if each is not type(None)), value)
    return value


def _needed(kind: type, value: Mapping[str, Any]) -> list[Field[Any]]:
    """The fields that are there, and those that have to be."""
    return [f for f in fields(kind) if f.name in value or f.default is f.default_factory is MISSING]


def schema(record: type) -> dict[str, Any]:
    """The JSON Schema of the files that `dumps` writes of a report of this type."""
    definitions: dict[str, Any] = {}
    described = _described(record, definitions)
    own = {"format": {"const": FORMAT}, "version": {"const": VERSION}}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": FORMAT,
        **described,
        "properties": own | described["properties"],
        "required": [*own, *described["required"]],
        "$defs": definitions,
    }


def _described(record: type, definitions: dict[str, Any]) -> dict[str, Any]:
    hints, comments = get_type_hints(record), _comments(record)
    properties = {
        f.name: _type(hints[f.name], definitions) | ({"description": said} if (said := comments.get(f.name)) else {})
        for f in fields(record)
    }
    return {
        "type": "object",
        "description": inspect.cleandoc(record.__doc__ or ""),
        "properties": properties,
        "required": [*properties],
    }


def _type(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    names = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
    if kind in names:
        return {"type": names[kind]}
    origin, inside = get_origin(kind), get_args(kind)
    if origin is types.UnionType:
        return {"anyOf": [_type(each, definitions) for each in inside]}
    if origin is Literal:
        return {"enum": [*inside]}
    if origin is tuple and inside[-1] is not Ellipsis:
        return {"type": "array", "prefixItems": [_type(each, definitions) for each in inside], "items": False}
    if origin is tuple:
        return {"type": "array", "items": _type(inside[0], definitions)}
    if origin is Mapping:
        return {"type": "object", "additionalProperties": _type(inside[1], definitions)}
    if kind.__name__ not in definitions:
        definitions[kind.__name__] = {}
        definitions[kind.__name__] = _described(kind, definitions)
    return {"$ref": f"#/$defs/{kind.__name__}"}


def _comments(record: type) -> dict[str, str]:
    """For each field, the comment beside it, and the lines of comment above it."""
    source = textwrap.dedent(inspect.getsource(record))
    lines = source.splitlines()
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    comments = {}
    for node in definition.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            above = node.lineno - 1
            while lines[above - 1].strip().startswith("#"):
                above -= 1
            assert node.end_lineno is not None
            said = [*lines[above : node.lineno - 1], lines[node.end_lineno - 1][node.end_col_offset :]]
            comments[node.target.id] = " ".join(line.strip().removeprefix("#").strip() for line in said).strip()
    return comments
