"""Typed reading of JSON that users may edit: values are checked against dataclass annotations."""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from autoshard.errors import AutoshardError

Readers = Mapping[Any, Callable[[Any, str], Any]]
"""type → custom reader (data, path in the file), for types whose fields do not define it"""

_KIND_TEXTS = {str: "a text", bool: "true or false", int: "an int", float: "a number", type(None): "null"}


class SchemaError(ValueError):
    """JSON of the wrong type; the message has the path."""


def parse_json(text: str | bytes) -> Any:
    """``text`` parsed as JSON. Raises :class:`SchemaError`."""
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise SchemaError(f"it is not JSON: {type(error).__name__}: {str(error)[:200]}") from error


def read_as(kind: Any, data: Any, path: str = "", readers: Readers = types.MappingProxyType({})) -> Any:
    """JSON ``data`` as a ``kind``: dataclass, named tuple, tuple, mapping by text, union or scalar;
    missing fields get defaults. ``path``: place in the file, for a :class:`SchemaError`."""
    if kind in readers:
        return _with_path(readers[kind], data, path)
    origin, of = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        kinds = [k for k in of if k is not type(None)]
        return None if data is None and len(kinds) < len(of) else read_as(kinds[0], data, path, readers)
    if origin in (tuple, collections.abc.Sequence):
        each = of[:1] * len(_expect_container(list, data, path)) if origin is not tuple or of[-1] is ... else of
        if len(each) != len(_expect_container(list, data, path)):
            raise SchemaError(f"{path} has {len(each)} entries, got {_abbreviated_repr(data)}")
        return tuple(read_as(k, x, f"{path}[{i}]", readers) for i, (k, x) in enumerate(zip(each, data, strict=True)))
    if origin is collections.abc.Mapping:
        return {
            name: read_as(of[1], x, f"{path}[{name!r}]", readers)
            for name, x in _expect_container(dict, data, path).items()
        }
    if dataclasses.is_dataclass(kind):
        return _with_path(lambda x, p: kind(**read_fields(kind, x, p, readers)), data, path)  # type: ignore[operator]
    if hasattr(kind, "_fields"):
        values = read_as(tuple[tuple(_hints(kind).values())], data, path, readers)  # type: ignore[misc]
        return kind(*values)
    return _scalar(kind, data, path)


def read_fields(kind: Any, data: Any, path: str = "", readers: Readers = types.MappingProxyType({})) -> dict[str, Any]:
    """Fields of dataclass ``kind`` in ``data``. Raises :class:`SchemaError` if one is missing."""
    hints, given = _hints(kind), _expect_container(dict, data, path)
    found = {}
    for field in dataclasses.fields(kind):
        where = f"{path}.{field.name}" if path else field.name
        default = field.default
        if field.name not in given:
            if default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                raise SchemaError(f"{where} is missing")
            continue
        if given[field.name] is None and isinstance(default, float) and math.isnan(default):
            continue  # JSON has no nan
        found[field.name] = read_as(hints[field.name], given[field.name], where, readers)
    return found


_hints = functools.cache(typing.get_type_hints)


def to_python_numbers(value: Any) -> Any:
    """``value`` with NumPy numbers (also in tuples) as Python numbers, which JSON can write."""
    if isinstance(value, tuple):
        each = map(to_python_numbers, value)
        return type(value)(*each) if hasattr(value, "_fields") else type(value)(each)
    return value.item() if isinstance(value, np.generic) else value


def _with_path(make: Callable[[Any, str], Any], data: Any, path: str) -> Any:
    try:
        return make(data, path)
    except SchemaError:
        raise
    except (AutoshardError, TypeError, ValueError) as error:
        raise SchemaError(f"{path or 'it'}: {error}" if path else str(error)) from error


def _expect_container(kind: type, data: Any, path: str) -> Any:
    if not isinstance(data, (list, tuple) if kind is list else Mapping):
        raise SchemaError(
            f"{path or 'it'} is {'a list' if kind is list else 'an object'}, got {_abbreviated_repr(data)}"
        )
    return data


def _scalar(kind: Any, data: Any, path: str) -> Any:
    fits = type(data) in ((int, float) if kind is float else (kind,))
    if fits and type(data) is int:  # JSON has ints of any size
        fits = abs(data) < (2**1000 if kind is float else 2**63)
    if not fits or data != data:
        raise SchemaError(f"{path or 'it'} is {_KIND_TEXTS[kind]}, got {_abbreviated_repr(data)}")
    return data


def _abbreviated_repr(data: Any) -> str:
    text = repr(data)
    return text if len(text) < 80 else f"{text[:76]} …"
