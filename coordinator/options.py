"""Options of a run: one frozen model, the same for the driver, the coordinator and every node.

Rules: a name that is not known is an error, not ignored; every number's name has its unit (`_s` seconds, `_bytes`
bytes); every way to get it wrong ends in an OptionsError that names the option, the value and what to do.

`Options.load()` reads, highest first: **keywords > environment (`LASTGOOD_SAVE_FREQ=20`) > YAML file (`config=` or
`LASTGOOD_CONFIG`) > defaults**. `Options(...)` and `Options.model_validate(...)` read nothing but what they are given,
so `model_dump(mode="json")` crosses to actors and is rebuilt there unchanged.

Other names for the same things (ALIASES in option_names.py):

    ======================  ================  ================================================
    name                    option            known from
    ======================  ================  ================================================
    save_freq               save_freq         verl (there -1 is never; so is -1, 0 or none here)
    save_total_limit        save_total_limit  Hugging Face
    max_actor_ckpt_to_keep  save_total_limit  verl
    checkpoint_storage      store             verl, NeMo
    resume_mode             resume            verl: auto, disable, resume_path
    resume_from_path        resume            verl, with resume_mode=resume_path
    resume_from_checkpoint  resume            Hugging Face: True (= latest), False (= none), a path
    ======================  ================  ================================================

verl's `default_local_dir` is not among them: it is a store to some and a node's own disk to others.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict
from typing_extensions import Self

from ..storage.errors import OptionsError
from ..storage.layout import NAME
from . import option_values
from .option_names import canonical
from .roots import (
    check_apart,
    check_outside_session,
    check_root,
    check_template,
    has_placeholders,
    redact,
    resolve_staging,
    shown,
)

__all__ = ["ENV_PREFIX", "Options", "redact", "resolve_staging"]

ENV_PREFIX = "LASTGOOD_"
# Variables that are no options: read elsewhere, or injected by Kubernetes beside a service called lastgood-something.
_NOT_OPTIONS = re.compile(r"config|failpoints|(.+_)?service_(host|port)(_.+)?|(.+_)?port(_\d+_(tcp|udp|sctp)(_.+)?)?")
_SECONDS = "seconds, above 0"


def _option(default: Any, takes: str, what: str, **limits: Any) -> Any:
    """One option: its default (`...` when it must be given), what values it takes, what it does."""
    return Field(default, description=what, json_schema_extra={"takes": takes}, **limits)


def _deadline(default: float, what: str) -> Any:
    return _option(default, _SECONDS, what, gt=0, allow_inf_nan=False)


class Options(BaseSettings):
    """Everything that can be set about a run. Raises OptionsError, and nothing else, for what cannot be used."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", env_prefix=ENV_PREFIX, validate_default=False)

    run: str = _option(..., "a name of letters, digits, `.`, `_`, `-` (at most 128)", "Name of the training run.")
    store: str = _option(
        ..., "an absolute path or file:// URL, the same on every node", "Root where checkpoints are kept for good."
    )
    staging: str = _option(
        ...,
        "an absolute path, or a template with {label:NAME}, {env:NAME}, {hostname}, {node_ip}",
        "Root on each node's own fast disk, where a save is written first.",
    )

    image_root: str = _option(
        "/dev/shm", "an absolute path in shared memory (tmpfs)", "Where each node keeps the images of a snapshot."
    )

    save_freq: int | None = _option(
        10, "a whole number of steps, at least 1; none, 0 or -1 to save only on request", "Steps between saves.", ge=1
    )
    snapshot_freq: int | None = _option(
        None,
        "a whole number of steps, at least 1; none to keep none",
        "Steps between snapshots that stay in memory (twice the memory) until the next one. When a process dies the"
        " newest is saved, so a crash costs the step in progress and not those since the last save. Steps that end"
        " while a save is being written are not kept.",
        ge=1,
    )
    snapshot: Literal["blocking", "overlapped"] = _option(
        "blocking",
        "blocking or overlapped",
        "Whether end_step waits until the state is copied into memory. overlapped: it returns at once, the copy runs"
        " beside what follows (a rollout, a forward pass), and the next optimizer step waits for it.",
    )
    save_first: bool = _option(False, "true or false", "Also save the first step that ends, due or not.")
    save_last: bool = _option(True, "true or false", "close() saves the last step if it is not saved yet.")
    save_total_limit: int | None = _option(
        None, "a whole number, at least 1; none to keep all", "How many committed checkpoints are kept.", ge=1
    )

    resume: int | str = _option(
        "auto",
        "auto, latest, none, a step number, or the absolute path of a checkpoint",
        "Where to start. auto: the newest whole checkpoint, from scratch only if there never was a commit; latest: the"
        " same, but an error if there is none; none: from scratch.",
    )
    allow_changes: tuple[str, ...] = _option(
        (), "a list of fingerprint names", "Differences from the checkpoint that a resume accepts."
    )
    on_reshard: dict[str, Literal["error", "fresh", "rank0"]] = _option(
        {},
        "component names, each with error, fresh or rank0",
        "What becomes of a component that cannot change world size (error if it is not named): error refuses, fresh"
        " keeps the new process's own state, rank0 gives every rank that of rank 0.",
    )
    on_lost: Literal["continue", "refuse"] = _option(
        "continue",
        "continue or refuse",
        "When commits newer than anything whole are known to be lost: resume from the newest whole one, or stop.",
    )
    fingerprint: dict[str, Any] = _option(
        {}, "names with JSON values", "Facts about the run that a resume compares (dataset length, batch size, ...)."
    )
    takeover: bool = _option(False, "true or false", "Take the run from a coordinator that seems to be alive.")

    on_failure: Literal["continue", "abort"] = _option(
        "continue", "continue or abort", "After a failed save: train on, the previous checkpoint stands; or raise."
    )
    max_consecutive_failures: int = _option(
        3, "a whole number, at least 1", "With on_failure=continue, this many failed saves in a row raise.", ge=1
    )

    save_on_preemption: bool = _option(
        True,
        "true or false",
        "SIGTERM in the driver, and Ray's notice that a node of the run is drained, save the last finished step.",
    )
    preemption_wait_s: float = _deadline(
        25.0, "How long SIGTERM waits for that save before it ends the driver; what is copied by then still commits."
    )
    save_deadline_s: float = _deadline(900.0, "From the request of a save to its commit, unless the request says less.")
    snapshot_deadline_s: float = _deadline(60.0, "From the order to copy state until the last member has copied it.")
    stage_deadline_s: float = _deadline(600.0, "From the snapshot until every node has written and fsynced its shards.")
    accept_deadline_s: float = _deadline(60.0, "From staged until every participant's record stands.")
    upload_deadline_s: float = _deadline(3600.0, "One try at copying a committed checkpoint to the store.")
    register_deadline_s: float = _deadline(120.0, "From add_members until all its members have registered.")
    return_deadline_s: float = _deadline(
        30.0,
        "How long end_step waits for a stager that died and is being restarted, before it goes on unsaved.",
    )
    resume_deadline_s: float = _deadline(900.0, "From resume() until every member has read, verified and restored.")
    heartbeat_s: float = _deadline(1.0, "Between two signs of life of an agent, a stager and the coordinator.")
    linger_s: float = _deadline(300.0, "How long coordinator and stagers wait for a driver to return before they exit.")

    block_bytes: int = _option(
        64 << 20,
        "bytes, a multiple of 4096 from 5 MiB to 5 GiB",
        "Size of the blocks that are hashed, each by itself.",
        ge=5 << 20,
        le=5 << 30,
        multiple_of=4096,
    )

    def __init__(self, *, _names: Mapping[str, str] | None = None, **values: Any) -> None:
        """Checks what is given, aliases included. `_names`: where each came from, for errors (load() says it)."""
        fields, names = canonical(values, type(self).model_fields)
        names.update(_names or {})
        try:
            super().__init__(**_without_idle_none(fields))
        except ValidationError as error:
            # `from None`: pydantic's own text holds the raw input, which may hold keys.
            raise _refusal(error, names) from None
        except OptionsError as error:
            raise _located(error, names) from None

    def __setattr__(self, name: str, value: Any) -> None:
        raise OptionsError(
            f"options do not change: {name} cannot be set. Make new ones with Options.load().", option=name
        )

    @classmethod
    def load(cls, config: str | os.PathLike[str] | None = None, **keywords: Any) -> Self:
        """The options from keywords, environment, YAML file and defaults (in this order of precedence).

        A keyword of None is "not given" where the option does not take None. An empty environment variable is not set.
        Raises OptionsError naming the option, where it was given, and what to do.
        """
        lower = ENV_PREFIX.lower()  # the source lowers the names of variables; an empty one counts as not set
        variables = EnvSettingsSource(cls, case_sensitive=False, env_prefix=ENV_PREFIX, env_ignore_empty=True).env_vars
        environment = {name[len(lower) :]: text for name, text in variables.items() if name.startswith(lower) and text}
        path = config if config is not None else environment.get("config")
        environment = {name: text for name, text in environment.items() if not _NOT_OPTIONS.fullmatch(name)}
        sources = [
            (_read_yaml(path) if path is not None else {}, str, f" (in {path})"),
            (environment, lambda name: f"{ENV_PREFIX}{name.upper()}", ""),
            ({name: value for name, value in keywords.items() if value is not None or _takes_none(name)}, str, ""),
        ]
        merged: dict[str, Any] = {}
        names: dict[str, str] = {}
        verl_path: Any = None
        for raw, spell, place in sources:
            values, given_as = canonical(raw, cls.model_fields, spell, place, verl_path)
            values = _without_idle_none(values)
            merged.update(values)
            names.update({field: given_as[field] for field in values})
            verl_path = raw.get("resume_from_path") or verl_path
        return cls(_names=names, **merged)

    @classmethod
    def model_validate(cls, obj: Any, **_: Any) -> Self:
        """Rebuilds options from `model_dump(mode="json")`; reads no environment and no file."""
        if isinstance(obj, cls):
            return obj
        if not isinstance(obj, Mapping) or not all(isinstance(name, str) for name in obj):
            raise OptionsError(f"options are {shown(obj)}; give a mapping of names to values.", option="options")
        return cls(**obj)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Keywords only: a coordinator on another node must not mix in that node's environment. See load()."""
        return (init_settings,)

    def check_session(self, session_dir: str) -> None:
        """Refuses roots in the live Ray session's directory, which only the caller knows. Raises OptionsError."""
        check_outside_session("store", self.store, session_dir)
        if not has_placeholders(self.staging):
            check_outside_session("staging", self.staging, session_dir)

    def staging_on(
        self, *, labels: Mapping[str, str], env: Mapping[str, str], hostname: str, node_ip: str, session_dir: str = ""
    ) -> str:
        """The staging root of one node: the template filled in, then checked like a plain root. Raises OptionsError."""
        root = resolve_staging(self.staging, labels=labels, env=env, hostname=hostname, node_ip=node_ip)
        check_apart(self.run, self.store, root)
        if session_dir:
            check_outside_session("staging", root, session_dir)
        return root

    @field_validator("run")
    @classmethod
    def _run_name(cls, value: str) -> str:
        if not NAME.fullmatch(value):
            raise ValueError("it must start with a letter or digit, since it names a directory")
        return value

    @field_validator("store", "staging", mode="before")
    @classmethod
    def _path_to_text(cls, value: Any) -> Any:
        return os.fspath(value) if isinstance(value, os.PathLike) else value

    @field_validator("store")
    @classmethod
    def _store_root(cls, value: str) -> str:
        return check_root("store", value)

    @field_validator("staging")
    @classmethod
    def _staging_root(cls, value: str) -> str:
        return check_template(value)

    @field_validator("image_root")
    @classmethod
    def _image_root(cls, value: str) -> str:
        return check_root("image_root", value)

    @field_validator("save_freq", "snapshot_freq", "save_total_limit", mode="before")
    @classmethod
    def _number_or_none(cls, value: Any) -> Any:
        return option_values.number_or_none(value)

    @field_validator("save_freq", "snapshot_freq", mode="before")
    @classmethod
    def _frequency(cls, value: Any) -> Any:
        return option_values.frequency(value)

    @field_validator("save_total_limit", "max_consecutive_failures", "block_bytes", mode="before")
    @classmethod
    def _number(cls, value: Any) -> Any:
        return option_values.number(value)

    @field_validator("resume", mode="before")
    @classmethod
    def _resume(cls, value: Any) -> Any:
        return option_values.resume_target(value)

    @field_validator("allow_changes", mode="before")
    @classmethod
    def _names_of_changes(cls, value: Any) -> Any:
        return option_values.name_list(value)

    @field_validator("on_reshard", mode="before")
    @classmethod
    def _words(cls, value: Any) -> Any:
        return option_values.word_mapping(value)

    @field_validator("fingerprint", mode="before")
    @classmethod
    def _facts(cls, value: Any) -> Any:
        return option_values.fact_mapping(value)

    @field_validator("fingerprint")
    @classmethod
    def _json_facts(cls, value: dict[str, Any]) -> dict[str, Any]:
        return option_values.json_facts(value)

    @model_validator(mode="after")
    def _separate_roots(self) -> Self:
        if not has_placeholders(self.staging):
            check_apart(self.run, self.store, self.staging)
        return self


def _takes_none(name: str) -> bool:
    return name in ("save_freq", "snapshot_freq", "save_total_limit")


def _without_idle_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None or _takes_none(name)}


def _read_yaml(path: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionsError(f"config {os.fspath(path)} cannot be read: {error.strerror}.", option="config") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)  # its text holds the line itself, which may hold keys
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise OptionsError(f"config {os.fspath(path)} is not valid YAML{where}. Mend it.", option="config") from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise OptionsError(f"config {os.fspath(path)} must hold `name: value` lines at its top.", option="config")
    return content


def option_takes(field: FieldInfo) -> str:
    """What values an option takes, in words (the docs' table and the errors use it)."""
    extra = field.json_schema_extra
    return str(extra["takes"]) if isinstance(extra, dict) else ""


def _refusal(error: ValidationError, names: Mapping[str, str]) -> OptionsError:
    lines = [_sentence(detail, names) for detail in error.errors(include_url=False, include_context=False)]
    first = error.errors(include_url=False)[0]["loc"]
    return OptionsError("\n".join(lines), option=str(first[0]) if first else "options")


def _located(error: OptionsError, names: Mapping[str, str]) -> OptionsError:
    """The same error with the name under which the option was given, where that is another."""
    option = str(error.facts.get("option", ""))
    name = names.get(option, option)
    return error if name == option else OptionsError(f"{error.message} (It was given as {name}.)", **error.facts)


def _sentence(detail: ErrorDetails, names: Mapping[str, str]) -> str:
    field = str(detail["loc"][0])
    wanted = f"It takes {option_takes(Options.model_fields[field])}."
    if detail["type"] == "missing":
        variable = f"{ENV_PREFIX}{field.upper()}"
        return f"{field} is not given. {wanted} Pass {field}=..., put it into the YAML file or set {variable}."
    reason = detail["msg"].removeprefix("Value error, ")
    at = "".join(f"[{part!r}]" for part in detail["loc"][1:])
    return f"{names.get(field, field)}{at} is {shown(detail['input'])}: {reason[0].lower()}{reason[1:]}. {wanted}"
