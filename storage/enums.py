"""Enums that may stand in a state tree: (class, member name, value), given back only through a registered class.

Nothing is imported by the name in a checkpoint; a class that the process did not register is an error that says so.
"""

from __future__ import annotations

import enum
from typing import Any, TypeVar

from .errors import UsageError

E = TypeVar("E", bound=type[enum.Enum])

_by_name: dict[str, type[enum.Enum]] = {}
_names: dict[type[enum.Enum], str] = {}


def register_enum(cls: E) -> E:
    """Allows members of `cls` in state trees, under its qualified name; usable as a class decorator.

    Registering again a class of the same module and name replaces it (a reload, a class that crossed processes).
    Raises UsageError when another module's class holds the name.
    """
    name = cls.__qualname__
    other = _by_name.get(name)
    if other is not None and other is not cls and other.__module__ != cls.__module__:
        raise UsageError(
            f"an enum named {name} of module {other.__module__} is registered already; that of {cls.__module__} "
            "was not registered. Rename one of them.",
            name=name,
        )
    _by_name[name] = cls
    _names[cls] = name
    return cls


def enum_name(cls: type[enum.Enum]) -> str | None:
    """The name under which `cls` is registered; None when it is not."""
    return _names.get(cls)


def find_member(name: str, member: str | None, value: Any) -> enum.Enum:
    """The member of a registered enum. Raises UsageError when the class is unknown here or has changed."""
    cls = _by_name.get(name)
    if cls is None:
        raise UsageError(
            f"the checkpoint holds a member of the enum {name}, which this process has not registered. Nothing was "
            f"restored; call lastgood.storage.tree.register_enum({name.rpartition('.')[2]}) before.",
            name=name,
        )
    try:
        found = cls[member] if member is not None and member in cls.__members__ else cls(value)
    except (ValueError, TypeError):
        found = None
    if found is None or found.value != value or (member is not None and found.name != member):
        raise UsageError(
            f"the checkpoint holds {name}.{member} = {value!r}, which the registered enum {cls.__module__}.{name} "
            "does not have. Nothing was restored; give the member back its name and value.",
            name=name,
            member=member,
            value=value,
        )
    return found
