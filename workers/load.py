"""Restore of one member from a committed checkpoint. The rule: two phases, and the first touches nothing live.

prepared = load.prepare(member, manifest, locate)     reads, verifies, checks that it fits, stages in host memory
prepared.apply()                                      writes the live objects; only after all members have voted
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..storage.errors import FingerprintError, IntegrityError, OptionsError, ResumeError, UsageError
from ..storage.fingerprint import compare, of_rank
from ..storage.manifest import Manifest, ShardRecord
from .component import Component, LoadContext, Reshard
from .device_fence import synchronize
from .member import Member
from .merge import merged_tree, own_tree, require_agreement
from .shard_reader import ShardCopy, ShardReader

Locate = Callable[[ShardRecord], ShardCopy]  # a local copy of the shard; it is verified here
POLICIES = ("error", "fresh", "rank0")


@dataclass
class PreparedMember:
    """A member's state, verified and staged in host memory. Nothing live was touched yet."""

    member: Member
    step: int
    updates: int | None
    bytes_read: int
    fresh: tuple[str, ...]  # components that stay as they are: by policy, or allowed by name
    _parts: list[tuple[str, Component, Any]]

    def apply(self) -> None:
        """Writes the live objects, once, in any thread. Raises ResumeError when one fails: live state is mixed then."""
        apply_all([self])

    def _take_parts(self) -> list[tuple[str, Component, Any]]:
        parts, self._parts = self._parts, []
        return parts

    def _apply(self, name: str, component: Component, prepared: Any) -> None:
        try:
            component.apply(prepared)
        except Exception as error:
            raise ResumeError(
                f"member {self.member.id}: component {name} of step {self.step} was verified and then could not be "
                f"applied: {type(error).__name__}: {error}. The live state is partly restored and must not be used; "
                "end this process and resume again.",
                member=str(self.member.id),
                component=name,
            ) from error


def apply_all(loaded: Sequence[PreparedMember]) -> None:
    """Applies all members of one process together, by ascending `order` over all of them: they share its random
    streams, so those come after whatever any member's restore may draw."""
    devices = {device for one in loaded for device in one.member.devices()}
    for one in loaded:
        one.member.close_window(one.member.gate.hold_limit_s)
    synchronize(devices)
    parts = [(one, *part) for one in loaded for part in one._take_parts()]
    with torch.no_grad():
        for one, name, component, prepared in sorted(parts, key=lambda part: part[2].order):  # stable
            one._apply(name, component, prepared)
    synchronize(devices)
    for one in loaded:
        one.member.restored(one.updates)


def prepare(
    member: Member,
    manifest: Manifest,
    locate: Locate,
    on_reshard: Mapping[str, str] | None = None,
    allow_changes: Collection[str] = (),
) -> PreparedMember:
    """Reads and verifies what `member` needs of the checkpoint, and checks that it fits; touches nothing live.

    `on_reshard`: for components that belong to their rank, by component or `role.component`, when the role has another
    number of members: "error" (default), "fresh" (left as it is), "rank0" (every member takes rank 0's).
    `allow_changes`: changes accepted by name, as errors name them: `actor.world_size`, `trainer.dataloader.batch_size`,
    `actor.ema` (a component that only one side has).

    Raises FingerprintError naming every change that is not allowed, IntegrityError for bytes that are not what was
    committed, UsageError when a component cannot be loaded by this number of members; what `locate` raises passes.
    """
    for name, policy in (on_reshard or {}).items():
        if policy not in POLICIES:
            raise OptionsError(
                f"on_reshard[{name!r}] is {policy!r}; it may be {', '.join(POLICIES)}. Nothing was touched.", name=name
            )
    return _Loader(member, manifest, locate, dict(on_reshard or {}), frozenset(allow_changes)).prepare()


class _Loader:
    """One prepare of one member."""

    def __init__(
        self,
        member: Member,
        manifest: Manifest,
        locate: Locate,
        on_reshard: Mapping[str, str],
        allow: frozenset[str],
    ) -> None:
        self.member = member
        self.manifest = manifest
        self.locate = locate
        self.on_reshard = on_reshard
        self.allow = allow
        self.role = member.id.role
        self.readers: dict[str, ShardReader] = {}  # by path

    def prepare(self) -> PreparedMember:
        self._compare(lambda name: not name.endswith(".structure"))  # a changed structure is told key by key below
        fresh = self._compare_components()
        parts: list[tuple[str, Component, Any]] = []
        try:
            for name, component in sorted(self.member.components.items(), key=lambda item: (item[1].order, item[0])):
                if name in fresh:
                    continue
                tree = self._tree(name, component)
                if tree is None:
                    fresh.add(name)
                    continue
                context = LoadContext(f"{self.role}.{name}", str(self.member.id), self.allow)
                parts.append((name, component, self._prepared(component, tree[0], context)))
            self._compare(lambda name: name.endswith(".structure"))
        finally:
            for reader in self.readers.values():
                reader.close()
        return PreparedMember(
            member=self.member,
            step=self.manifest.step,
            updates=self._updates(),
            bytes_read=sum(reader.bytes_read for reader in self.readers.values()),
            fresh=tuple(sorted(fresh)),
            _parts=parts,
        )

    def _compare(self, chosen: Callable[[str], bool]) -> None:
        saved = self.manifest.fingerprint
        prefix = f"{self.role}."
        if not any(name.startswith(prefix) for name in saved):
            return  # written without one
        mine = of_rank({name: value for name, value in saved.items() if name.startswith(prefix)}, self.member.id.rank)
        compare(
            {name: value for name, value in mine.items() if chosen(name)},
            {name: value for name, value in self.member.fingerprint().items() if chosen(name)},
            self.allow,
        )

    def _compare_components(self) -> set[str]:
        """Components that stay as they are because the checkpoint lacks them and that is allowed by name."""
        record = self.manifest.roles.get(self.role)
        if record is None:
            roles = ", ".join(sorted(self.manifest.roles))
            raise FingerprintError(
                f"member {self.member.id}: the checkpoint of step {self.manifest.step} holds no role {self.role} (it "
                f"holds {roles}). Nothing was touched; name the roles as they were, or resume from another checkpoint.",
                changes={self.role: (None, "present")},
                member=str(self.member.id),
            )
        live, saved = set(self.member.components), set(record.components)
        changed = {f"{self.role}.{name}": (None, "present") for name in sorted(live - saved)}
        changed |= {f"{self.role}.{name}": ("present", None) for name in sorted(saved - live)}
        refused = {name: pair for name, pair in changed.items() if name not in self.allow}
        if refused:
            what = ", ".join(
                f"{name} is only in the {'run' if old is None else 'checkpoint'}" for name, (old, _) in refused.items()
            )
            raise FingerprintError(
                f"member {self.member.id}: the run and the checkpoint of step {self.manifest.step} do not have the "
                f"same components: {what}. Nothing was touched; declare the same state, or accept it by name: "
                f"allow_changes={sorted(refused)}.",
                changes=refused,
                member=str(self.member.id),
            )
        return live - saved

    def _tree(self, name: str, component: Component) -> tuple[Any] | None:
        """The tree for a component, in a tuple; None when it stays as it is."""
        where = f"{self.role}.{name}"
        record = self.manifest.roles[self.role]
        same_size = record.world_size == self.member.world_size
        if component.on_reshard is Reshard.BOXES:
            merged = functools.cache(lambda: merged_tree(self._distinct(name), where))
            return (own_tree(self._reader(name, self.member.id.rank), where, merged) if same_size else merged(),)
        if same_size:
            return (self._reader(name, self.member.id.rank).tree(whole=True),)
        policy = self.on_reshard.get(where, self.on_reshard.get(name, "error"))
        if policy == "fresh":
            return None
        if policy == "rank0":
            return (self._reader(name, 0).tree(whole=True),)
        if component.on_reshard is Reshard.AGREE:
            return (require_agreement(self._distinct(name), where),)
        raise UsageError(
            f"member {self.member.id}: component {name} ({component.kind}) belongs to its rank; it was saved by "
            f"{record.world_size} members of {self.role}, and there are {self.member.world_size} now. Nothing was "
            f"touched; resume with {record.world_size} members, or choose for it: on_reshard={{{where!r}: 'fresh'}} "
            "(left as it is) or 'rank0' (all take rank 0's).",
            component=where,
            saved_world_size=record.world_size,
            world_size=self.member.world_size,
        )

    def _prepared(self, component: Component, tree: Any, context: LoadContext) -> Any:
        try:
            return component.prepare(tree, context)
        except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
            raise FingerprintError(
                f"member {context.member}: what the checkpoint of step {self.manifest.step} holds as {context.where} "
                f"is not state of the kind {component.kind} ({type(error).__name__}: {error}). Nothing was touched; "
                "declare the same state as when it was written.",
                member=context.member,
                changes={context.where: ("another kind of state", component.kind)},
            ) from error

    def _distinct(self, component: str) -> list[ShardReader]:
        """One reader for each different shard of a component: files with the same digest say the same."""
        records = sorted(
            (s for s in self.manifest.shards if (s.role, s.component) == (self.role, component)), key=lambda s: s.rank
        )
        first: dict[tuple[str, int], ShardRecord] = {}
        for record in records:
            first.setdefault((record.digest, record.nbytes), record)
        return [self._open(record) for record in first.values()]

    def _reader(self, component: str, rank: int) -> ShardReader:
        for record in self.manifest.shards:
            if (record.role, record.rank, record.component) == (self.role, rank, component):
                return self._open(record)
        raise IntegrityError(
            f"the manifest of attempt {self.manifest.attempt} lists no shard {component} of {self.role}:{rank}. "
            "Nothing was touched; resume from another checkpoint.",
            path=f"{self.role}:{rank}.{component}",
        )

    def _open(self, record: ShardRecord) -> ShardReader:
        if record.path not in self.readers:
            self.readers[record.path] = ShardReader(self.locate(record), record)
        return self.readers[record.path]

    def _updates(self) -> int | None:
        counts = {record.updates for record in self.manifest.members if record.role == self.role}
        if len(counts) > 1:
            raise IntegrityError(
                f"the members of {self.role} in attempt {self.manifest.attempt} do not agree on their count of updates "
                f"({sorted(map(str, counts))}). Nothing was touched; resume from another checkpoint.",
                path=self.manifest.attempt,
            )
        return counts.pop() if counts else None
