"""Where options come from: keywords > environment > YAML > defaults; and what reads nothing."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from lastgood.coordinator.options import Options
from lastgood.storage.errors import OptionsError

ROOTS: dict[str, Any] = {"run": "qwen-grpo", "store": "/nfs/ckpts", "staging": "/local/ckpt"}


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.upper().startswith("LASTGOOD_"):
            monkeypatch.delenv(name)


def yaml_file(folder: Path, text: str) -> Path:
    path = folder / "lastgood.yaml"
    path.write_text(text)
    return path


def test_keywords_win_over_environment_over_yaml_over_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = yaml_file(tmp_path, "save_freq: 2\nstage_deadline_s: 2\nheartbeat_s: 2\n")
    monkeypatch.setenv("LASTGOOD_SAVE_FREQ", "3")
    monkeypatch.setenv("LASTGOOD_STAGE_DEADLINE_S", "3")
    loaded = Options.load(config, **ROOTS, save_freq=4)
    assert (loaded.save_freq, loaded.stage_deadline_s, loaded.heartbeat_s) == (4, 3, 2)
    assert loaded.linger_s == Options.model_fields["linger_s"].default


def test_precedence_holds_between_two_names_of_one_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = yaml_file(tmp_path, "resume: none\nstore: /from/yaml\nrun: r\nstaging: /local\n")
    monkeypatch.setenv("LASTGOOD_RESUME_MODE", "latest")
    loaded = Options.load(config, checkpoint_storage="/from/keyword")
    assert (loaded.resume, loaded.store) == ("latest", "/from/keyword")


def test_verls_pair_may_come_from_two_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = yaml_file(tmp_path, "resume_from_path: /nfs/x/global_step_4\n")
    assert Options.load(config, **ROOTS, resume_mode="resume_path").resume == "/nfs/x/global_step_4"
    config = yaml_file(tmp_path, "resume_mode: resume_path\n")
    monkeypatch.setenv("LASTGOOD_RESUME_FROM_PATH", "/nfs/x/global_step_5")
    assert Options.load(config, **ROOTS).resume == "/nfs/x/global_step_5"


def test_the_file_may_be_named_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LASTGOOD_CONFIG", str(yaml_file(tmp_path, "save_freq: 7\n")))
    assert Options.load(**ROOTS).save_freq == 7
    other = tmp_path / "other.yaml"
    other.write_text("")
    assert Options.load(other, **ROOTS).save_freq == Options.model_fields["save_freq"].default


def test_every_option_can_be_given_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {
        "run": "r",
        "store": "/nfs/ckpts",
        "staging": "{label:nvme}/ckpt",
        "image_root": "/mnt/images",
        "save_freq": "none",
        "snapshot_freq": "5",
        "snapshot": "overlapped",
        "save_first": "true",
        "save_last": "0",
        "save_total_limit": "4",
        "save_on_preemption": "no",
        "resume": "400",
        "allow_changes": "batch_size, dataset",
        "on_reshard": "rng=rank0,dataloader=fresh",
        "on_lost": "refuse",
        "fingerprint": "rows=7473,model=qwen2",
        "takeover": "yes",
        "on_failure": "abort",
        "max_consecutive_failures": "5",
        "block_bytes": "8388608",
    }
    seconds = [name for name in Options.model_fields if name.endswith("_s")]
    wanted.update(dict.fromkeys(seconds, "2.5"))
    assert set(wanted) == set(Options.model_fields)
    for name, text in wanted.items():
        monkeypatch.setenv(f"LASTGOOD_{name.upper()}", text)
    loaded = Options.load()
    assert loaded.save_freq is None
    assert loaded.resume == 400
    assert loaded.allow_changes == ("batch_size", "dataset")
    assert loaded.on_reshard == {"rng": "rank0", "dataloader": "fresh"}
    assert loaded.fingerprint == {"rows": 7473, "model": "qwen2"}
    assert (loaded.save_first, loaded.save_last, loaded.takeover) == (True, False, True)
    assert {getattr(loaded, name) for name in seconds} == {2.5}


def test_lists_and_mappings_in_the_environment_may_be_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LASTGOOD_ALLOW_CHANGES", '["a", "b"]')
    monkeypatch.setenv("LASTGOOD_FINGERPRINT", '{"sizes": [1, 2]}')
    loaded = Options.load(**ROOTS)
    assert loaded.allow_changes == ("a", "b")
    assert loaded.fingerprint == {"sizes": [1, 2]}


def test_an_empty_variable_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LASTGOOD_SAVE_FREQ", "")
    monkeypatch.setenv("LASTGOOD_CONFIG", "")
    assert Options.load(**ROOTS).save_freq == Options.model_fields["save_freq"].default


def test_a_keyword_of_none_is_not_given_where_none_is_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LASTGOOD_STORE", "/from/environment")
    monkeypatch.setenv("LASTGOOD_SAVE_FREQ", "3")
    loaded = Options.load(run="r", store=None, staging="/local", on_lost=None, save_freq=None)
    assert loaded.store == "/from/environment"
    assert loaded.save_freq is None


def test_an_unknown_variable_is_refused_with_the_nearest_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LASTGOOD_SAVE_FREK", "3")
    with pytest.raises(OptionsError, match=r"LASTGOOD_SAVE_FREK\. Did you mean LASTGOOD_SAVE_FREQ\?"):
        Options.load(**ROOTS)


def test_variables_that_kubernetes_injects_for_a_service_are_no_options(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "LASTGOOD_SERVICE_HOST",
        "LASTGOOD_SERVICE_PORT",
        "LASTGOOD_SERVICE_PORT_HTTP",
        "LASTGOOD_PORT",
        "LASTGOOD_PORT_8265_TCP",
        "LASTGOOD_PORT_8265_TCP_ADDR",
        "LASTGOOD_HEAD_SERVICE_HOST",
        "LASTGOOD_HEAD_PORT_8265_TCP_PROTO",
        "LASTGOOD_FAILPOINTS",
    ):
        monkeypatch.setenv(name, "10.0.0.1")
    assert Options.load(**ROOTS) == Options(**ROOTS)


def test_an_error_names_the_variable_or_the_file_that_gave_the_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = yaml_file(tmp_path, "heartbeat_s: soon\n")
    with pytest.raises(OptionsError, match=r"heartbeat_s \(in .*lastgood\.yaml\) is 'soon'"):
        Options.load(config, **ROOTS)
    monkeypatch.setenv("LASTGOOD_STORE", "ckpts")
    with pytest.raises(OptionsError, match="given as LASTGOOD_STORE"):
        Options.load(run="r", staging="/local")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("save_freq: [1\n", "not valid YAML at line"),
        ("- a\n- b\n", "name: value"),
        ("1: 2\n", "name: value"),
        ("save_frq: 3\n", r"unknown option save_frq \(in .*\)\. Did you mean save_freq\?"),
        ("store: !!python/object/apply:os.getcwd []\n", "not valid YAML"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(OptionsError, match=said) as caught:
        Options.load(yaml_file(tmp_path, text), run="r", staging="/local")
    assert "lastgood.yaml" in str(caught.value)


def test_a_missing_file_is_an_error_not_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(OptionsError, match="cannot be read: No such file"):
        Options.load(tmp_path / "absent.yaml", **ROOTS)


def test_what_crosses_to_an_actor_is_rebuilt_unchanged_whatever_its_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent = Options.load(
        **ROOTS, save_freq=None, resume=400, allow_changes=["a"], on_reshard={"rng": "rank0"}, fingerprint={"n": (1, 2)}
    )
    monkeypatch.setenv("LASTGOOD_SAVE_FREQ", "99")
    monkeypatch.setenv("LASTGOOD_STORE", "relative")
    monkeypatch.setenv("LASTGOOD_NONSENSE", "1")
    assert Options.model_validate(json.loads(json.dumps(sent.model_dump(mode="json")))) == sent
    assert Options.model_validate(sent) is sent
    assert pickle.loads(pickle.dumps(sent)) == sent  # noqa: S301
    assert Options(**ROOTS).save_freq == Options.model_fields["save_freq"].default


@pytest.mark.parametrize("content", [None, [], "text", {1: 2}])
def test_rebuilding_from_something_else_is_an_options_error(content: object) -> None:
    with pytest.raises(OptionsError):
        Options.model_validate(content)


def test_options_do_not_change() -> None:
    loaded = Options(**ROOTS)
    with pytest.raises(OptionsError, match="run cannot be set"):
        loaded.run = "other"
    assert loaded.run == "qwen-grpo"
