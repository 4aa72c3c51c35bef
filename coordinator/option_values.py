"""Values of options as people write them: in an environment variable, a YAML file or verl's words, made plain.

Each function is called before the model checks types, takes any value, and leaves alone what it does not know. What
it knows to be wrong is a ValueError with the reason; the model turns that into an OptionsError naming the option.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

from .option_names import WAITING_FOR_PATH
from .roots import check_root

RESUME_MODES = ("auto", "latest", "none")


def number_or_none(value: Any) -> Any:
    """`none`, `null`, `never` and an empty text are None."""
    return None if isinstance(value, str) and value.strip().lower() in ("none", "null", "never", "") else value


def number(value: Any) -> Any:
    """Refuses True and False, which Python would count as 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("a yes or no is not a number")
    return value


def frequency(value: Any) -> Any:
    """verl's -1, and 0, mean never."""
    return None if number(value) in (0, -1, "0", "-1") else value


def resume_target(value: Any) -> int | str:
    """A mode, a step number or an absolute path. Raises OptionsError for a path that may not be one."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, bool):  # Hugging Face's resume_from_checkpoint
        return "latest" if value else "none"
    if isinstance(value, int):
        if value < 0:
            raise ValueError("a step is not negative")
        return value
    if not isinstance(value, str):
        raise ValueError("it is neither a word, a number nor a path")
    text = value.strip()
    if text.lower() in RESUME_MODES:
        return text.lower()
    if text.isdecimal():
        return int(text)
    if text == WAITING_FOR_PATH:
        raise ValueError("resume_mode=resume_path needs resume_from_path=PATH")
    if "/" not in text:
        raise ValueError("no such mode")
    return check_root("resume", text)


def name_list(value: Any) -> Any:
    """A comma-separated text or a JSON list is a tuple of names; so is any other list."""
    if isinstance(value, str):
        text = value.strip()
        return _json(text) if text.startswith("[") else tuple(part.strip() for part in text.split(",") if part.strip())
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, (Mapping, bytes)) else value


def word_mapping(value: Any) -> Any:
    """`name=word,name=word` or a JSON object is a mapping of words."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text.startswith("{"):
        return _json(text)
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    if not all(sign for _, sign, _ in pairs):
        raise ValueError("as text it is written name=value,name=value or as a JSON object")
    return {name.strip(): word.strip() for name, _, word in pairs}


def fact_mapping(value: Any) -> Any:
    """Like word_mapping; each value is read as JSON where it is JSON (`rows=7473` is a number), else kept as text."""
    if not isinstance(value, str) or value.strip().startswith("{"):
        return word_mapping(value)
    return {name: _json_or_text(word) for name, word in word_mapping(value).items()}


def json_facts(value: Mapping[str, Any]) -> dict[str, Any]:
    """The same facts as they will be when read back from a manifest (tuples are lists).

    Raises ValueError naming the one that JSON cannot carry (nan and inf are none of JSON's numbers).
    """
    for name, fact in value.items():
        try:
            json.dumps(fact, allow_nan=False)
        except (TypeError, ValueError):
            raise ValueError(f"{name!r} is a {type(fact).__name__} that JSON cannot carry; make it text") from None
    return json.loads(json.dumps(value))


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise ValueError("it looks like JSON but is not") from None


def _json_or_text(word: str) -> Any:
    try:
        return json.loads(word)
    except ValueError:
        return word
