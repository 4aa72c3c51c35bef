"""Where everything lies: names, relative keys and confinement. The rule: a path is built here or it is checked here.

Keys are relative to the root, with `/`, and start with the run's name; the same keys name objects in the store and
files under the staging directory. Every name that becomes part of a key matches NAME, so it cannot be a path.

    <run>/latest.json  lock  node.json  epoch.json  reserve/  owner.json  records/  ledger/  epochs/
    <run>/global_step_400/COMPLETED                                          the step's pointer
    <run>/global_step_400/<attempt>/{COMPLETED,manifest.json,DURABLE,staged.json}
    <run>/global_step_400/<attempt>/<role>/rank_00003.<component>.safetensors
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from .errors import IntegrityError, OptionsError

NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
NAME = re.compile(NAME_PATTERN)

COMPLETED = "COMPLETED"
MANIFEST = "manifest.json"
DURABLE = "DURABLE"
STAGED = "staged.json"
RESERVED = frozenset({COMPLETED, MANIFEST, DURABLE, STAGED})  # files beside the role directories: no role is named so

_STEP = re.compile(r"global_step_(0|[1-9][0-9]{0,18})")
_LEDGER = re.compile(r"([0-9]{8,19})-([0-9]{8,19})\.json")
_EPOCH = re.compile(r"[0-9]{8,19}")
_SHARD = re.compile(rf"({NAME_PATTERN})/rank_([0-9]{{5,9}})\.({NAME_PATTERN})\.safetensors")


def check_name(what: str, name: str) -> str:
    """Answers `name` if it may be part of a path. `what` (run, role, component, tag) is for the error.

    Raises OptionsError otherwise.
    """
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise OptionsError(
            f"{what} {name!r} cannot be part of a path: use 1 to 128 letters, digits, '.', '_' or '-', beginning with "
            "a letter or digit. Nothing was touched; choose another name.",
            name=name,
            what=what,
        )
    if what == "role" and name in RESERVED:
        raise OptionsError(
            f"role {name!r} is the name of a file of every checkpoint. Nothing was touched; choose another name.",
            name=name,
            what=what,
        )
    return name


def shard_path(role: str, rank: int, component: str) -> str:
    """The path of a shard inside its attempt's directory. Raises OptionsError for names that cannot be part of one."""
    check_name("role", role)
    check_name("component", component)
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < 10**9:
        raise OptionsError(f"rank {rank!r} of role {role} is not a count from 0. Nothing was touched.", rank=rank)
    return f"{role}/rank_{rank:05d}.{component}.safetensors"


def parse_shard_path(path: str) -> tuple[str, int, str] | None:
    """(role, rank, component) of a shard's path inside its attempt; None when it is not one."""
    match = _SHARD.fullmatch(path)
    if not match:
        return None
    role, rank, component = match[1], int(match[2]), match[3]
    if role in RESERVED or shard_path(role, rank, component) != path:
        return None
    return role, rank, component


def check_relative(relative: str) -> str:
    """Answers `relative` if it is a plain path below a root, as text. Raises IntegrityError otherwise.

    Refused: empty, absolute, `.`, `..` or empty parts, NUL, backslash, text that is not UTF-8.
    """
    reason = None
    if not isinstance(relative, str) or not relative:
        reason = "it is empty"
    elif "\0" in relative or "\\" in relative:
        reason = "it holds NUL or a backslash"
    elif relative.startswith("/"):
        reason = "it is absolute"
    elif any(part in ("", ".", "..") for part in relative.split("/")):
        reason = "it holds an empty part, '.' or '..'"
    elif any("\ud800" <= letter <= "\udfff" for letter in relative):
        reason = "it is not valid Unicode"
    if reason:
        raise IntegrityError(
            f"the path {relative!r} could leave its root: {reason}. Nothing was read or written there; "
            "do not trust what named it.",
            path=relative,
        )
    return relative


def confine(root: str | Path, relative: str) -> Path:
    """The place of `relative` below `root`; it need not exist. Raises IntegrityError when it would leave the root.

    Symbolic links below the root are followed to see where they lead; a link that leads outside is refused.
    """
    check_relative(relative)
    place = Path(root) / relative
    try:
        real_root, real = Path(root).resolve(), place.resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, before Python 3.13
        raise IntegrityError(
            f"cannot tell where {place} leads: {error}. Nothing was read or written there; look at the links in it.",
            path=str(place),
        ) from error
    if real == real_root or not real.is_relative_to(real_root):
        raise IntegrityError(
            f"{place} leads to {real}, outside of {real_root}. Nothing was read or written there; remove the symbolic "
            "link, or do not trust what named it.",
            path=str(place),
        )
    return place


def step_name(step: int) -> str:
    """The name of a step's directory."""
    return f"global_step_{step}"


def parse_step_name(name: str) -> int | None:
    """The step of a directory's name; None when it is not a step's directory."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def parse_ledger_name(name: str) -> tuple[int, int] | None:
    """(epoch, sequence) of a ledger object's name; None when it is not one."""
    match = _LEDGER.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def parse_epoch_name(name: str) -> int | None:
    """The number of an epoch object's name; None when it is not one."""
    return int(name) if _EPOCH.fullmatch(name) else None


def epochs_in(keys: Iterable[str]) -> frozenset[int]:
    """The epochs that keys of the store name."""
    numbers = (parse_epoch_name(key.rsplit("/", 1)[-1]) for key in keys)
    return frozenset(number for number in numbers if number is not None)


class RunPaths:
    """The keys of one run, relative to `root`. Pure text, except `place`, which gives the file of a key."""

    def __init__(self, root: str | Path, run: str) -> None:
        """`root` is the staging directory, or the store's root (then only keys are of use). Raises OptionsError."""
        self.root = root
        self.run = check_name("run", run)

    def place(self, key: str) -> Path:
        """The file of `key` below a local root. Raises IntegrityError when it would leave the root."""
        return confine(self.root, key)

    @property
    def latest(self) -> str:
        return f"{self.run}/latest.json"

    @property
    def node(self) -> str:
        return f"{self.run}/node.json"

    @property
    def epoch_note(self) -> str:
        """The highest epoch that a staging directory has seen."""
        return f"{self.run}/epoch.json"

    @property
    def lock(self) -> str:
        return f"{self.run}/lock"

    @property
    def reserve(self) -> str:
        """Bytes that a staging directory keeps for records on a full disk."""
        return f"{self.run}/reserve"

    @property
    def owner(self) -> str:
        return f"{self.run}/owner.json"

    @property
    def records(self) -> str:
        return f"{self.run}/records"

    def record(self, attempt: str) -> str:
        return f"{self.records}/{check_name('attempt', attempt)}.json"

    @property
    def ledgers(self) -> str:
        return f"{self.run}/ledger"

    def ledger(self, epoch: int, sequence: int) -> str:
        """Padded, so that a listing by name is a listing by (epoch, sequence)."""
        return f"{self.ledgers}/{epoch:08d}-{sequence:08d}.json"

    @property
    def epochs(self) -> str:
        return f"{self.run}/epochs"

    def epoch(self, number: int) -> str:
        return f"{self.epochs}/{number:08d}"

    def step_dir(self, step: int) -> str:
        return f"{self.run}/{step_name(step)}"

    def pointer(self, step: int) -> str:
        return f"{self.step_dir(step)}/{COMPLETED}"

    def attempt_dir(self, step: int, attempt: str) -> str:
        return f"{self.step_dir(step)}/{check_name('attempt', attempt)}"

    def completed(self, step: int, attempt: str) -> str:
        return f"{self.attempt_dir(step, attempt)}/{COMPLETED}"

    def manifest(self, step: int, attempt: str) -> str:
        return f"{self.attempt_dir(step, attempt)}/{MANIFEST}"

    def durable(self, step: int, attempt: str) -> str:
        """The note of a node that it has seen the store's COMPLETED for the attempt."""
        return f"{self.attempt_dir(step, attempt)}/{DURABLE}"

    def staged(self, step: int, attempt: str) -> str:
        return f"{self.attempt_dir(step, attempt)}/{STAGED}"

    def shard(self, step: int, attempt: str, path: str) -> str:
        """The key of a shard by its path inside the attempt. Raises IntegrityError for a path that is not plain."""
        return f"{self.attempt_dir(step, attempt)}/{check_relative(path)}"
