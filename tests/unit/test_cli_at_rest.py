"""The command line on checkpoints at rest: what lies in a store or a staging directory, without Ray."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lastgood.client.cli import app
from lastgood.storage.digest import digest_blocks
from lastgood.storage.ids import ulid, utc_text
from lastgood.storage.layout import COMPLETED, shard_path
from lastgood.storage.manifest import (
    Completed,
    Manifest,
    MemberRecord,
    NodeIdentity,
    Parent,
    RoleRecord,
    ShardRecord,
)

RUN = "qwen-grpo"
NODES = ("node-a", "node-b")


def lastgood(*arguments: str | Path) -> tuple[int, Any, str]:
    """(exit code, JSON answer or None, standard error) of one command with --json."""
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    return done.exit_code, json.loads(done.stdout) if done.stdout else None, done.stderr


def commit(
    root: Path, step: int, sequence: int, node: str | None = None, run: str | None = None, **fields: Any
) -> Path:
    """A committed attempt of two ranks on two nodes; only the shards of `node` when that is given."""
    attempt = ulid()
    run = run or RUN
    folder = root / run / f"global_step_{step}" / attempt
    shards = []
    for rank, owner in enumerate(NODES):
        for component in ("model", "optimizer"):
            content = hashlib.sha256(f"{step} {rank} {component}".encode()).digest() * 400
            digests = digest_blocks(content, 4096)
            path = shard_path("actor", rank, component)
            shards.append(
                ShardRecord(
                    role="actor",
                    rank=rank,
                    component=component,
                    path=path,
                    nbytes=digests.nbytes,
                    block_bytes=digests.block_bytes,
                    blocks=digests.blocks,
                    digest=digests.digest,
                    node=owner,
                )
            )
            if node in (None, owner):
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_bytes(content)
    manifest = Manifest(
        run=run,
        attempt=attempt,
        step=step,
        epoch=1,
        sequence=sequence,
        kind="scheduled",
        created_at=utc_text(1_900_000_000.0 + sequence),
        roles={"actor": RoleRecord(world_size=2, components=("model", "optimizer"))},
        members=tuple(MemberRecord(role="actor", rank=rank, node=owner) for rank, owner in enumerate(NODES)),
        participants=NODES,
        shards=tuple(shards),
        **fields,
    )
    data = manifest.to_bytes()
    marker = Completed.of(manifest, data, utc_text(1_900_000_001.0 + sequence)).to_bytes()
    (folder / "manifest.json").write_bytes(data)
    (folder / COMPLETED).write_bytes(marker)
    (folder.parent / COMPLETED).write_bytes(marker)
    return folder


def shard(folder: Path, rank: int = 0, component: str = "model") -> Path:
    return folder / shard_path("actor", rank, component)


def test_latest_is_the_highest_sequence_not_the_highest_step(tmp_path: Path) -> None:
    commit(tmp_path, 400, 1)
    rewound = commit(tmp_path, 300, 2, tag="emergency")
    code, answer, _ = lastgood("latest", tmp_path / RUN)
    assert code == 0
    assert answer["checkpoint"] == {
        "run": RUN,
        "step": 300,
        "attempt": rewound.name,
        "epoch": 1,
        "sequence": 2,
        "kind": "scheduled",
        "tag": "emergency",
        "committed_at": "2030-03-17T17:46:43.000Z",
        "nbytes": 4 * 12800,
        "path": str(rewound),
    }


@pytest.mark.parametrize("command", ["latest", "show"])
def test_latest_and_show_name_a_damaged_checkpoint_that_is_newer_and_still_answer(tmp_path: Path, command: str) -> None:
    old, whole, newest = (commit(tmp_path, step, step) for step in (3, 4, 5))
    for folder in (old, newest):
        (folder / "manifest.json").write_bytes(b"{}")
    done = CliRunner().invoke(app, [command, str(tmp_path / RUN)])
    assert done.exit_code == 0
    assert str(whole) in done.stdout.replace("\n", "")
    assert str(newest) in done.stderr
    assert str(old) not in done.stderr
    code, answer, said = lastgood(command, tmp_path / RUN)
    assert (code, answer["checkpoint" if command == "latest" else "manifest"]["step"]) == (0, 4)
    assert [one["path"] for one in json.loads(said)["warning"]["passed_over"]] == [str(newest)]


def test_latest_ignores_what_is_not_committed(tmp_path: Path) -> None:
    whole = commit(tmp_path, 1, 1)
    (commit(tmp_path, 2, 2) / COMPLETED).unlink()
    code, answer, _ = lastgood("latest", tmp_path / RUN)
    assert (code, answer["checkpoint"]["path"]) == (0, str(whole))


@pytest.mark.parametrize("command", ["latest", "verify", "show"])
def test_where_nothing_is_committed_the_code_is_1_and_a_sentence_says_so(tmp_path: Path, command: str) -> None:
    (tmp_path / RUN).mkdir()
    for place, said in ((tmp_path / RUN, "no committed checkpoint at"), (tmp_path / "absent", "does not exist")):
        code, answer, told = lastgood(command, place)
        assert (code, answer) == (1, None)
        error = json.loads(told)["error"]
        assert error["type"] == "NotACheckpointError"
        assert said in error["message"]


def test_a_root_above_the_runs_names_them(tmp_path: Path) -> None:
    commit(tmp_path, 1, 1)
    code, _, told = lastgood("latest", tmp_path)
    assert code == 1
    assert f"these runs: {RUN}" in json.loads(told)["error"]["message"]


def test_a_file_url_is_a_path_and_another_scheme_is_a_usage_error(tmp_path: Path) -> None:
    commit(tmp_path, 1, 1)
    assert lastgood("latest", f"file://{tmp_path / RUN}")[0] == 0
    code, _, told = lastgood("latest", "s3://AKIAKEY:secret@bucket/ckpts/qwen-grpo")
    assert code == 2
    assert "this version stores on file systems" in told
    assert "secret" not in told


def test_a_relative_path_is_taken_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = commit(tmp_path, 1, 1)
    monkeypatch.chdir(tmp_path)
    assert lastgood("latest", RUN)[1]["checkpoint"]["path"] == str(folder)


def test_checkpoints_come_newest_first_with_what_was_rejected(tmp_path: Path) -> None:
    first, second, torn = (commit(tmp_path, step, step) for step in (1, 2, 3))
    (torn / "manifest.json").write_bytes(b"{}")
    code, answer, _ = lastgood("checkpoints", tmp_path / RUN)
    assert code == 0
    assert [one["path"] for one in answer["checkpoints"]] == [str(second), str(first)]
    assert [(one["path"], one["kind"]) for one in answer["rejected"]] == [(str(torn), "broken")]
    assert "digest" in answer["rejected"][0]["reason"]


def test_a_step_or_an_attempt_narrows_what_is_listed(tmp_path: Path) -> None:
    one, again = commit(tmp_path, 1, 1), commit(tmp_path, 1, 2)
    commit(tmp_path, 2, 3)
    assert [c["path"] for c in lastgood("checkpoints", one.parent)[1]["checkpoints"]] == [str(again), str(one)]
    assert [c["path"] for c in lastgood("checkpoints", one)[1]["checkpoints"]] == [str(one)]


def test_verify_reads_every_shard_of_every_checkpoint(tmp_path: Path) -> None:
    commit(tmp_path, 1, 1)
    commit(tmp_path, 2, 2)
    code, answer, _ = lastgood("verify", tmp_path / RUN)
    assert (code, answer["ok"], answer["rejected"]) == (0, True, [])
    assert [(one["checkpoint"]["step"], one["ok"], one["shards"]) for one in answer["verified"]] == [
        (2, True, 4),
        (1, True, 4),
    ]


def _flip(folder: Path) -> None:
    data = bytearray(shard(folder).read_bytes())
    data[5000] ^= 1
    shard(folder).write_bytes(data)


def _truncate(folder: Path) -> None:
    shard(folder).write_bytes(shard(folder).read_bytes()[:-1])


def _delete(folder: Path) -> None:
    shard(folder).unlink()


def _swap(folder: Path) -> None:
    one, other = shard(folder, 0).read_bytes(), shard(folder, 1).read_bytes()
    shard(folder, 0).write_bytes(other)
    shard(folder, 1).write_bytes(one)


@pytest.mark.parametrize("damage", [_flip, _truncate, _delete, _swap])
def test_verify_finds_damage_names_the_file_and_exits_2(tmp_path: Path, damage: Any) -> None:
    whole, hurt = commit(tmp_path, 1, 1), commit(tmp_path, 2, 2)
    damage(hurt)
    code, answer, _ = lastgood("verify", tmp_path / RUN)
    assert (code, answer["ok"]) == (2, False)
    newest, oldest = answer["verified"]
    assert (newest["ok"], oldest["ok"]) == (False, True)
    assert any(shard_path("actor", 0, "model") in finding["path"] for finding in newest["findings"])
    assert all(finding["fatal"] and finding["kind"] and finding["detail"] for finding in newest["findings"])
    assert lastgood("verify", tmp_path / RUN, "--attempt", whole.name)[0] == 0
    assert lastgood("verify", tmp_path / RUN, "--attempt", hurt.name)[0] == 2
    assert lastgood("verify", whole)[0] == 0


def test_an_attempt_under_way_or_a_stranger_is_told_but_is_not_damage(tmp_path: Path) -> None:
    whole, under_way = commit(tmp_path, 1, 1), commit(tmp_path, 2, 2)
    (under_way / COMPLETED).unlink()
    (whole / "actor" / "notes.txt").write_text("left by somebody")
    code, answer, _ = lastgood("verify", tmp_path / RUN)
    assert (code, answer["ok"]) == (0, True)
    assert [one["kind"] for one in answer["rejected"]] == ["uncommitted"]
    assert [(one["kind"], one["fatal"]) for one in answer["verified"][0]["findings"]] == [("stranger", False)]


def test_a_broken_manifest_is_damage(tmp_path: Path) -> None:
    torn = commit(tmp_path, 1, 1)
    (torn / "manifest.json").write_bytes(b"{}")
    code, answer, _ = lastgood("verify", tmp_path / RUN)
    assert (code, answer["ok"], answer["verified"]) == (2, False, [])
    assert [one["kind"] for one in answer["rejected"]] == ["broken"]


def test_verify_of_an_attempt_that_is_not_there_says_so(tmp_path: Path) -> None:
    commit(tmp_path, 1, 1)
    code, _, told = lastgood("verify", tmp_path / RUN, "--attempt", "other")
    assert code == 1
    assert "other" in told


def test_in_a_staging_directory_only_that_nodes_shards_are_expected(tmp_path: Path) -> None:
    folder = commit(tmp_path, 1, 1, node="node-b")
    (tmp_path / RUN / "node.json").write_bytes(NodeIdentity(node="node-b").to_bytes())
    code, answer, _ = lastgood("verify", tmp_path / RUN)
    assert (code, answer["verified"][0]["shards"]) == (0, 2)
    shard(folder, rank=1).unlink()
    assert lastgood("verify", tmp_path / RUN)[0] == 2


def test_show_tells_what_a_checkpoint_consists_of(tmp_path: Path) -> None:
    first = commit(tmp_path, 1, 1)
    parent = Parent(attempt=first.name, step=1, epoch=1, sequence=1)
    commit(tmp_path, 2, 2, parent=parent, metrics={"reward": 0.5, "loss": float("nan")}, fingerprint={"rows": 7473})
    code, answer, _ = lastgood("show", tmp_path / RUN)
    manifest = answer["manifest"]
    assert code == 0
    assert (manifest["step"], manifest["parent_step"], manifest["parent_attempt"]) == (2, 1, first.name)
    assert manifest["roles"] == [
        {"role": "actor", "world_size": 2, "component_nbytes": {"model": 25600, "optimizer": 25600}}
    ]
    assert manifest["metrics"] == {"reward": 0.5, "loss": None}
    assert manifest["fingerprint"] == {"rows": 7473}
    assert lastgood("show", tmp_path / RUN, "--attempt", first.name)[1]["manifest"]["step"] == 1


def test_the_documented_keys_are_the_keys(tmp_path: Path) -> None:
    commit(tmp_path, 1, 1)
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    answers = [lastgood(command, tmp_path / RUN)[1] for command in ("latest", "checkpoints", "verify", "show")]
    free = {"metrics", "fingerprint", "versions", "component_nbytes"}  # named by the user

    def keys(value: Any) -> set[str]:
        if isinstance(value, dict):
            return set(value) | {name for key, item in value.items() if key not in free for name in keys(item)}
        return {name for item in value for name in keys(item)} if isinstance(value, list) else set()

    assert {name for name in keys(answers) if f"`{name}`" not in page} == set()


def test_text_shows_the_path_uncut_and_nothing_that_steers_a_terminal(tmp_path: Path) -> None:
    root = tmp_path / ("deep" * 30)
    folder = commit(root, 1, 1, reason="\x1b[31m[bold]red[/bold]", tag="before-lr-change")
    for command in ("latest", "checkpoints", "verify", "show"):
        done = CliRunner().invoke(app, [command, str(root / RUN)])
        assert done.exit_code == 0
        assert folder.name in done.stdout
        assert "\x1b" not in done.stdout
    assert str(folder) in CliRunner().invoke(app, ["latest", str(root / RUN)]).stdout.splitlines()
    assert "[bold]red[/bold]" in CliRunner().invoke(app, ["show", str(root / RUN)]).stdout
    _flip(folder)
    done = CliRunner().invoke(app, ["verify", str(root / RUN)])
    assert done.exit_code == 2
    assert "NOT WHOLE" in done.stdout
    assert shard_path("actor", 0, "model") in done.stdout
