"""Store and staging roots: what would not outlive the cluster, or mean another place elsewhere, is refused at start."""

from __future__ import annotations

import pickle
import traceback
from pathlib import Path
from typing import Any

import pytest

from lastgood.coordinator.options import Options, resolve_staging
from lastgood.coordinator.roots import redact
from lastgood.storage.errors import OptionsError

ROOTS: dict[str, Any] = {"run": "qwen-grpo", "store": "/nfs/ckpts", "staging": "/local/ckpt"}
NODE: dict[str, Any] = {"labels": {"nvme": "/mnt/nvme0", "zone": "a"}, "env": {"SCRATCH": "/scratch/job"}}
NODE |= {"hostname": "trainer-7", "node_ip": "10.0.0.7"}


def options(**keywords: Any) -> Options:
    return Options(**{**ROOTS, **keywords})


@pytest.mark.parametrize("name", ["store", "staging"])
@pytest.mark.parametrize("root", ["checkpoints", "./checkpoints", "../up", "~/checkpoints", "checkpoints/a b", ""])
def test_a_relative_root_is_refused_at_start(name: str, root: str) -> None:
    with pytest.raises(OptionsError, match="absolute path") as caught:
        options(**{name: root})
    assert str(caught.value).startswith(name)


@pytest.mark.parametrize("name", ["store", "staging"])
@pytest.mark.parametrize(
    "root",
    [
        "/tmp/ray",
        "/tmp/ray/session_latest/ckpts",
        "/tmp/ray/ckpts",
        "/tmp/./ray//x",
        "/tmp/other/../ray/x",
        "file:///tmp/ray/x",
        "/scratch/ray/session_2026-11-30_00-12-33_123456_77/runtime_resources/working_dir_files/x",
        "/scratch/ray/session_latest/x",
    ],
)
def test_a_root_in_a_ray_session_directory_is_refused_at_start(name: str, root: str) -> None:
    with pytest.raises(OptionsError, match="Ray's session directory"):
        options(**{name: root})


def test_a_root_in_the_live_sessions_directory_is_refused_through_links_too(tmp_path: Path) -> None:
    session = tmp_path / "made" / "by" / "ray"
    session.mkdir(parents=True)
    (tmp_path / "innocent").symlink_to(session)
    for name in ("store", "staging"):
        made = options(**{name: str(tmp_path / "innocent" / "ckpts")})
        with pytest.raises(OptionsError, match=f"^{name} .*Ray's session directory"):
            made.check_session(str(session))
    options().check_session(str(session))


def test_a_name_that_only_begins_like_a_session_directory_is_fine() -> None:
    assert options(store="/tmp/rayleigh/session_notes").store == "/tmp/rayleigh/session_notes"


@pytest.mark.parametrize("url", ["s3://bucket/x", "gs://bucket/x", "hdfs://name/x", "S3://bucket/x"])
def test_another_scheme_is_refused_with_what_this_version_can(url: str) -> None:
    with pytest.raises(OptionsError, match="this version stores on file systems"):
        options(store=url)


@pytest.mark.parametrize(
    "url", ["file:///nfs/ckpts", "file://localhost/nfs/ckpts", "FILE:///nfs/ckpts/", "/nfs//ckpts/"]
)
def test_a_path_in_other_spellings_is_the_same_store(url: str) -> None:
    assert options(store=url) == options(store="/nfs/ckpts")


@pytest.mark.parametrize(
    "url", ["file://server/ckpts", "file:/ckpts", "file:///", "/", "file:///a?x=1", "/a\0b", "/a\nb"]
)
def test_a_root_that_names_no_directory_is_refused(url: str) -> None:
    with pytest.raises(OptionsError, match=r"^store "):
        options(store=url)


@pytest.mark.parametrize(
    ("store", "staging"), [("/a", "/a"), ("/a", "/a/qwen-grpo"), ("/a/qwen-grpo/x", "/a"), ("/a", "/a/../a")]
)
def test_store_and_staging_in_one_directory_are_refused(store: str, staging: str) -> None:
    with pytest.raises(OptionsError, match="same directory"):
        options(store=store, staging=staging)


def test_store_and_staging_side_by_side_are_fine() -> None:
    assert options(store="/a", staging="/a/staging").staging == "/a/staging"


SECRETS = [
    "s3://AKIAKEY:wJalr/XUtn@bucket/x",
    "https://user:pa%20ss@host/x?token=hunter2#frag",
    "s3://bucket/x?X-Amz-Signature=hunter2",
    "s3:/AKIAKEY:wJalr@bucket",
    "file://AKIAKEY:wJalr@host/x",
]


@pytest.mark.parametrize("url", SECRETS)
@pytest.mark.parametrize("name", ["store", "staging", "resume", "run", "save_freq", "checkpoint_storage"])
def test_no_secret_of_a_url_is_ever_shown(name: str, url: str) -> None:
    with pytest.raises(OptionsError) as caught:
        options(**{name: url})
    told = "".join(traceback.format_exception(caught.value)) + repr(caught.value.facts)
    told += repr(pickle.loads(pickle.dumps(caught.value)).__dict__)  # noqa: S301
    message = "".join(line for line in told.splitlines() if "Options(**" not in line)
    assert not any(secret in message for secret in ("AKIAKEY", "wJalr", "hunter2", "pa%20ss"))


def test_redaction_leaves_the_rest_to_read() -> None:
    assert redact("to s3://K:S@bucket/x?sig=1 and /plain/path") == "to s3://***@bucket/x?*** and /plain/path"
    assert redact("mail me@example.com") == "mail me@example.com"


@pytest.mark.parametrize(
    ("template", "root"),
    [
        ("/local/ckpt", "/local/ckpt"),
        ("{label:nvme}/lastgood", "/mnt/nvme0/lastgood"),
        ("{env:SCRATCH}", "/scratch/job"),
        ("/shared/{hostname}/{node_ip}", "/shared/trainer-7/10.0.0.7"),
        ("file:///shared/{hostname}", "/shared/trainer-7"),
    ],
)
def test_the_staging_template_is_filled_in_on_the_node(template: str, root: str) -> None:
    assert resolve_staging(template, **NODE) == root
    assert options(staging=template).staging_on(**NODE) == root


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("/x/{labl:nvme}", "Did you mean label"),
        ("/x/{host}", "Did you mean hostname"),
        ("/x/{label:}", "unknown placeholder"),
        ("/x/{hostname:a}", "unknown placeholder"),
        ("/x/{}", "unknown placeholder"),
        ("/x/{hostname", "brace"),
        ("/x/}{", "brace"),
        ("ckpt/{hostname}", "relative"),
        ("{hostname}/ckpt", "relative"),
        ("s3://bucket/{hostname}", "relative"),
    ],
)
def test_a_template_that_cannot_be_filled_in_is_refused_at_start(template: str, said: str) -> None:
    with pytest.raises(OptionsError, match=said):
        options(staging=template)


def test_a_missing_label_is_told_with_those_the_node_has() -> None:
    with pytest.raises(OptionsError, match=r"trainer-7 .*no label 'ssd'.*nvme, zone"):
        resolve_staging("{label:ssd}/x", **NODE)


def test_a_missing_variable_is_told_without_showing_the_others() -> None:
    with pytest.raises(OptionsError, match="no environment variable 'LOCAL'") as caught:
        resolve_staging("{env:LOCAL}/x", **NODE)
    assert "SCRATCH" not in str(caught.value)


@pytest.mark.parametrize("value", ["relative", "/tmp/ray/session_latest", "s3://bucket"])
def test_what_a_template_becomes_is_checked_like_a_plain_root(value: str) -> None:
    with pytest.raises(OptionsError, match=r"^staging "):
        resolve_staging("{label:nvme}", **{**NODE, "labels": {"nvme": value}})


def test_a_template_that_becomes_the_store_is_refused_on_the_node() -> None:
    made = options(store="/mnt/nvme0", staging="{label:nvme}")
    with pytest.raises(OptionsError, match="same directory"):
        made.staging_on(**NODE)
