"""Names of options: those of verl and Hugging Face are taken, conflicts and unknown names are refused."""

from __future__ import annotations

from typing import Any

import pytest

from lastgood.coordinator.option_names import ALIASES
from lastgood.coordinator.options import Options
from lastgood.storage.errors import OptionsError

ROOTS: dict[str, Any] = {"run": "qwen-grpo", "store": "/nfs/ckpts", "staging": "/local/ckpt"}


def options(**keywords: Any) -> Options:
    return Options(**{**ROOTS, **keywords})


@pytest.mark.parametrize(
    ("given", "option", "value"),
    [
        ({"save_freq": 20}, "save_freq", 20),
        ({"save_freq": -1}, "save_freq", None),
        ({"save_total_limit": 3}, "save_total_limit", 3),
        ({"max_actor_ckpt_to_keep": 3}, "save_total_limit", 3),
        ({"max_actor_ckpt_to_keep": None}, "save_total_limit", None),
        ({"resume_mode": "auto"}, "resume", "auto"),
        ({"resume_mode": "disable"}, "resume", "none"),
        ({"resume_mode": "resume_path", "resume_from_path": "/nfs/x/global_step_4"}, "resume", "/nfs/x/global_step_4"),
        ({"resume_from_path": "/nfs/x/global_step_4"}, "resume", "/nfs/x/global_step_4"),
        ({"resume_mode": "auto", "resume_from_path": None}, "resume", "auto"),
        ({"resume_from_checkpoint": True}, "resume", "latest"),
        ({"resume_from_checkpoint": False}, "resume", "none"),
        ({"resume_from_checkpoint": "/nfs/x/global_step_4"}, "resume", "/nfs/x/global_step_4"),
        ({"resume_from_checkpoint": None}, "resume", "auto"),
    ],
)
def test_names_of_verl_and_hugging_face_mean_the_same_here(given: dict[str, Any], option: str, value: object) -> None:
    assert getattr(options(**given), option) == value


def test_checkpoint_storage_is_the_store() -> None:
    assert Options(run="r", checkpoint_storage="/nfs/ckpts", staging="/local/ckpt").store == "/nfs/ckpts"


def test_every_alias_leads_to_an_option() -> None:
    assert {field for field, _ in ALIASES.values()} <= set(Options.model_fields)
    assert not set(ALIASES) & set(Options.model_fields)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"checkpoint_storage": "/other"}, ("store", "checkpoint_storage")),
        ({"resume": "none", "resume_mode": "auto"}, ("resume", "resume_mode")),
        ({"resume_mode": "auto", "resume_from_path": "/nfs/x"}, ("resume_mode", "resume_from_path")),
        ({"resume": 400, "resume_mode": "resume_path"}, ("resume_mode", "resume")),
        ({"save_total_limit": 2, "max_actor_ckpt_to_keep": 3}, ("save_total_limit", "max_actor_ckpt_to_keep")),
    ],
)
def test_two_names_with_different_values_are_refused_and_both_named(
    given: dict[str, Any], names: tuple[str, str]
) -> None:
    with pytest.raises(OptionsError) as caught:
        options(**given)
    assert all(f"{name}=" in str(caught.value) for name in names)


def test_two_names_with_the_same_value_are_fine() -> None:
    assert options(checkpoint_storage="/nfs/ckpts", save_total_limit=2, max_actor_ckpt_to_keep=2).save_total_limit == 2


def test_resume_path_mode_without_a_path_says_what_is_missing() -> None:
    with pytest.raises(OptionsError, match="needs resume_from_path"):
        options(resume_mode="resume_path")


@pytest.mark.parametrize(
    ("typo", "hint"),
    [
        ("save_frq", "Did you mean save_freq?"),
        ("Save-Freq", "Did you mean save_freq?"),
        ("stagging", "Did you mean staging?"),
        ("resume_form_path", "Did you mean resume_from_path?"),
        ("output_dir", "Here it is called store."),
        ("save_steps", "Here it is called save_freq."),
        ("default_local_dir", "Here it is called store (where checkpoints are kept) or staging"),
        ("zzz", "Known: run, store"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_known_one(typo: str, hint: str) -> None:
    with pytest.raises(OptionsError) as caught:
        options(**{typo: "value-that-may-be-a-key"})
    assert f"unknown option {typo}" in str(caught.value)
    assert hint in str(caught.value)
    assert "value-that-may-be-a-key" not in str(caught.value)
