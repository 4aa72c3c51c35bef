"""What a run looked like when a checkpoint was written, against what it looks like now. The rule: no silent change.

Names are `<role>.world_size` and `<role>.<component>.<name>`: `actor.model.structure`, `trainer.dataloader.batch_size`.
A change is refused with both values unless it is accepted by name. Where the ranks of a role do not have the same value
(stages of a pipeline, an optimizer of its own), `{"by_rank": [...]}` holds that of each.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from .errors import FingerprintError

BY_RANK = "by_rank"


def changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Every name whose value changed, as (saved, now); None stands for a name that one of them does not have."""
    return {
        name: (saved.get(name), now.get(name))
        for name in sorted(saved.keys() | now.keys())
        if saved.get(name) != now.get(name)
    }


def merged(by_rank: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The fingerprint of a role from those of its ranks, in their order."""
    names = sorted({name for facts in by_rank for name in facts})
    found: dict[str, Any] = {}
    for name in names:
        first = by_rank[0].get(name)
        alike = all(facts.get(name) == first for facts in by_rank)
        found[name] = first if alike else {BY_RANK: [facts.get(name) for facts in by_rank]}
    return found


def of_rank(facts: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """What a merged fingerprint says of one rank; what it does not say of this rank stays merged, and fits nobody."""
    return {name: _of_rank(value, rank) for name, value in facts.items()}


def _of_rank(value: Any, rank: int) -> Any:
    if isinstance(value, Mapping) and set(value) == {BY_RANK} and rank < len(value[BY_RANK]):
        return value[BY_RANK][rank]
    return value


def compare(saved: Mapping[str, Any], now: Mapping[str, Any], allow: Collection[str] = ()) -> None:
    """Raises FingerprintError naming every change that `allow` does not name, with both values.

    A name in `allow` stands for itself and all below it: `trainer.dataloader` accepts `trainer.dataloader.batch_size`.
    """
    refused = {name: pair for name, pair in changes(saved, now).items() if not _accepted(name, allow)}
    if not refused:
        return
    shown = "; ".join(f"{name}: saved {_show(old)}, now {_show(new)}" for name, (old, new) in refused.items())
    raise FingerprintError(
        f"the run is not the one that the checkpoint was written by: {shown}. Nothing was touched; start it as it was, "
        f"or accept the change by name: allow_changes={sorted(refused)}.",
        changes=refused,
    )


def _accepted(name: str, allow: Collection[str]) -> bool:
    return any(name == accepted or name.startswith(f"{accepted}.") for accepted in allow)


def _show(value: Any) -> str:
    return "nothing" if value is None else repr(value)
