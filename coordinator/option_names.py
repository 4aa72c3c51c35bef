"""Names of options: aliases users know from verl and Hugging Face, conflicts between two names, unknown names.

One door: `canonical()` turns the raw mapping of one source (keywords, environment or YAML file) into fields of
`Options`. It decides on names only; values are checked by the model.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..storage.errors import OptionsError
from .roots import shown

# alias -> (field, who calls it so). The same thing under another name; None means "not given", as it does there.
ALIASES: dict[str, tuple[str, str]] = {
    "checkpoint_storage": ("store", "verl, NeMo"),
    "max_actor_ckpt_to_keep": ("save_total_limit", "verl"),
    "resume_mode": ("resume", "verl: auto, disable, resume_path"),
    "resume_from_path": ("resume", "verl, with resume_mode=resume_path"),
    "resume_from_checkpoint": ("resume", "Hugging Face: True, False or a path"),
}

# Names from elsewhere that mean something near, but not the same: refused, with what to write here.
_NEAR: dict[str, str] = {
    "default_local_dir": "store (where checkpoints are kept) or staging (each node's own disk)",
    "default_hdfs_dir": "store",
    "output_dir": "store",
    "save_steps": "save_freq",
    "save_interval": "save_freq",
    "project_name": "run",
    "experiment_name": "run",
}

WAITING_FOR_PATH = "resume_path"  # verl's resume_mode when its resume_from_path comes from another source
_VERL_MODES = {"disable": "none", "disabled": "none"}


def canonical(
    raw: Mapping[str, Any],
    fields: Iterable[str],
    spell: Callable[[str], str] = str,
    place: str = "",
    path_below: Any = None,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Fields of `Options` from one source's names; second, the name under which each was given there.

    `spell` says how this source writes a name (LASTGOOD_SAVE_FREQ), `place` where it is (" (in x.yaml)");
    `path_below` is a resume_from_path from a source of lower precedence. Raises OptionsError for an unknown name
    (with the nearest known one) and for two names that give one option different values.
    """
    known = list(fields)
    values: dict[str, Any] = {}
    names: dict[str, str] = {}
    for name in raw:
        if name not in known and name not in ALIASES:
            raise _unknown(name, [*known, *ALIASES], spell, place)
    given = {name: value for name, value in raw.items() if not (name in ALIASES and value is None)}
    _pair_verl_resume(given, spell, path_below)
    for name, value in given.items():
        field = ALIASES[name][0] if name in ALIASES else name
        if name == "resume_mode":
            value = _VERL_MODES.get(value, value) if isinstance(value, str) else value
        if field in values and not _same(values[field], value):
            raise _conflict(names[field], values[field], spell(name) + place, value)
        values.setdefault(field, value)
        names.setdefault(field, spell(name) + place)
    return values, names


def _pair_verl_resume(given: dict[str, Any], spell: Callable[[str], str], path_below: Any) -> None:
    """verl says one thing with two names: resume_mode=resume_path and resume_from_path=PATH. Makes it one."""
    if given.get("resume_mode") != WAITING_FOR_PATH:
        return
    path = given.get("resume_from_path", path_below)
    if path is None and "resume" in given:
        raise _conflict(spell("resume_mode"), WAITING_FOR_PATH, spell("resume"), given["resume"])
    if path is not None:
        given["resume_mode"] = path


def _same(one: Any, other: Any) -> bool:
    return one == other or str(one) == str(other)


def _conflict(name: str, value: Any, other: str, other_value: Any) -> OptionsError:
    return OptionsError(
        f"{name}={shown(value)} and {other}={shown(other_value)} are two names for one option with different values."
        f" Keep one of them.",
        option=name,
    )


def _unknown(name: str, known: list[str], spell: Callable[[str], str], place: str) -> OptionsError:
    lowered = name.lower().replace("-", "_")
    if lowered in _NEAR:
        hint = f" Here it is called {_NEAR[lowered]}."
    else:
        close = difflib.get_close_matches(lowered, known, n=1)
        hint = f" Did you mean {spell(close[0])}?" if close else f" Known: {', '.join(spell(one) for one in known)}."
    return OptionsError(f"unknown option {spell(name)}{place}.{hint}", option=name)
