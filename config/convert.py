"""Tables of untyped values turned into the records of `schema`.

Owns the checks that every source of settings shares, and their messages. Does not own where a table comes from.
Surprising rule: NaN passes every range comparison, so finiteness is checked apart from the declared ranges.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import msgspec
from msgspec.inspect import DictType, Metadata, NoneType, Type, UnionType
from msgspec.structs import FieldInfo

from .schema import ConfigError
from .sizes import parse_bytes, size_text

Record = TypeVar("Record", bound=msgspec.Struct)

_SIGNS = {">=": "of at least", "<=": "of at most", ">": "above", "<": "below"}


def nearest(key: str, known: Iterable[str]) -> str:
    """A hint that names the known key most like `key`, or all of them when none is like it."""
    names = sorted(known)
    close = difflib.get_close_matches(key, names, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else f"known keys: {', '.join(names)}"


def fields_by_key(record: type[msgspec.Struct]) -> dict[str, FieldInfo]:
    """The fields of `record` by the key that tables use for them."""
    return {field.encode_name: field for field in msgspec.structs.fields(record)}


def described(field: FieldInfo) -> tuple[Type, str]:
    """The field's type without its annotations and without None, and its description."""
    kind, text = msgspec.inspect.type_info(field.type), ""
    while isinstance(kind, Metadata | UnionType):
        if isinstance(kind, Metadata):
            text = (kind.extra_json_schema or {}).get("description", text)
            kind = kind.type
        else:
            kind = next(part for part in kind.types if not isinstance(part, NoneType))
    return kind, text


def only_in_files(field: FieldInfo) -> bool:
    """Whether the field is a table, which a flag or a variable cannot hold."""
    return isinstance(described(field)[0], DictType)


def default_text(field: FieldInfo, value: object = msgspec.UNSET) -> str | None:
    """The field's default, or `value` in its place, as one would write it, sizes with their unit; None if that is
    unset."""
    if value is msgspec.UNSET:
        value = field.default
    if value is None or value == () or value is msgspec.NODEFAULT:
        return None
    if field.name.endswith("_bytes") and isinstance(value, int):
        return size_text(value)
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)


def checked_value(field: FieldInfo, value: object, where: str, *, text: bool = False) -> object:
    """`value` as the field's type. `text`: it is a string to be read as that type, lists separated by commas.

    Raises `ConfigError` that begins with `where` if the type, the range or the size is wrong, or the number not finite.
    Messages do not repeat the value: it may be an API key.
    """
    kind = msgspec.inspect.type_info(field.type)
    while isinstance(kind, msgspec.inspect.Metadata):
        kind = kind.type
    if isinstance(value, str):
        if field.name.endswith("_bytes"):
            value = _size(value, where)
        elif isinstance(kind, msgspec.inspect.VarTupleType):
            value = [part for part in value.split(",") if part] if text else [value]
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{where}: {value} is not a finite number")
    try:
        result: object = msgspec.convert(value, field.type, strict=not text)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {_choices(kind) or _told(error, value, field)}") from None
    if isinstance(result, float) and not math.isfinite(result):
        raise ConfigError(f"{where}: {result} is not a finite number")
    return result


def build(record: type[Record], values: Mapping[str, object], source: str) -> Record:
    """A record from checked values by key. Raises `ConfigError` naming the required keys that are missing."""
    fields = fields_by_key(record)
    missing = [key for key, field in fields.items() if field.required and key not in values]
    if missing:
        raise ConfigError(f"{source}: missing {', '.join(missing)}")
    return record(**{fields[key].name: value for key, value in values.items()})


def checked_table(
    record: type[msgspec.Struct],
    table: Mapping[str, object],
    where: Callable[[str], str],
    *,
    text: bool = False,
) -> dict[str, object]:
    """The values of `table`, checked against the fields of `record`; `where` names a key in messages.

    Raises `ConfigError` for an unknown key, naming it and the nearest known one.
    """
    fields = fields_by_key(record)
    for key in table:
        if key not in fields:
            raise ConfigError(f"{where(key)}: unknown key; {nearest(key, fields)}")
    return {key: checked_value(fields[key], value, where(key), text=text) for key, value in table.items()}


def _choices(kind: msgspec.inspect.Type) -> str | None:
    """What to say of a field that takes one of a few words; None for other fields."""
    for part in kind.types if isinstance(kind, msgspec.inspect.UnionType) else (kind,):
        if isinstance(part, msgspec.inspect.LiteralType):
            return f"must be one of {', '.join(map(str, part.values))}"
    return None


def _told(error: msgspec.ValidationError, value: object, field: FieldInfo) -> str:
    """What msgspec says, with the place in a list or a table as the number of the entry: its key may be a secret."""
    text, _, path = str(error).partition(" - at `$")
    text = text[:1].lower() + text[1:].replace("`", "")
    for sign, words in _SIGNS.items():
        text = text.replace(f" {sign} ", f" {words} ")
    if isinstance(value, dict):
        alone = ({key: entry} for key, entry in value.items())
        number = next((number for number, entry in enumerate(alone, 1) if not _fits(entry, field)), 0)
        return f"entry {number}: {text}"
    index = re.match(r"\[(\d+)\]", path)
    return f"entry {int(index[1]) + 1}: {text}" if index else text


def _fits(value: object, field: FieldInfo) -> bool:
    try:
        msgspec.convert(value, field.type)
    except msgspec.ValidationError:
        return False
    return True


def _size(text: str, where: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None
