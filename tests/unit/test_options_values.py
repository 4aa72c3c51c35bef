"""Values of options: each wrong one is an OptionsError that names option, value and what it takes."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lastgood.client.options_page import options_page
from lastgood.coordinator.options import Options, option_takes
from lastgood.storage.errors import OptionsError

ROOTS: dict[str, Any] = {"run": "qwen-grpo", "store": "/nfs/ckpts", "staging": "/local/ckpt"}


def options(**keywords: Any) -> Options:
    return Options(**{**ROOTS, **keywords})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("run", "a/b"),
        ("run", ""),
        ("run", ".hidden"),
        ("run", "x" * 129),
        ("run", "trailing\n"),
        ("save_freq", "soon"),
        ("save_freq", -2),
        ("save_freq", 2.5),
        ("save_freq", True),
        ("save_total_limit", 0),
        ("max_consecutive_failures", 0),
        ("max_consecutive_failures", True),
        ("save_last", "perhaps"),
        ("on_failure", "explode"),
        ("on_lost", ""),
        ("resume", "newest"),
        ("resume", -1),
        ("resume", 1.5),
        ("resume", "runs/global_step_4"),
        ("on_reshard", {"rng": "guess"}),
        ("on_reshard", "rng"),
        ("allow_changes", 3),
        ("fingerprint", {"model": object()}),
        ("fingerprint", {"loss": float("nan")}),
        ("fingerprint", "{not json"),
        ("heartbeat_s", 0),
        ("snapshot_deadline_s", float("inf")),
        ("stage_deadline_s", float("nan")),
        ("linger_s", -1),
        ("block_bytes", 4096),
        ("block_bytes", (5 << 20) + 1),
        ("block_bytes", 6 << 30),
    ],
)
def test_a_wrong_value_names_the_option_and_what_it_takes(name: str, value: object) -> None:
    with pytest.raises(OptionsError) as caught:
        options(**{name: value})
    assert caught.value.option == name
    assert str(caught.value).startswith(f"{name} ") or str(caught.value).startswith(f"{name}[")
    assert option_takes(Options.model_fields[name]) in str(caught.value) or "absolute path" in str(caught.value)
    assert "pydantic" not in str(caught.value).lower()


def test_all_wrong_values_are_told_at_once() -> None:
    with pytest.raises(OptionsError) as caught:
        options(save_freq="soon", on_lost="cry", heartbeat_s=0)
    assert [line.split()[0] for line in str(caught.value).splitlines()] == ["save_freq", "on_lost", "heartbeat_s"]


def test_what_must_be_given_is_asked_for_with_its_variable() -> None:
    with pytest.raises(OptionsError) as caught:
        Options(run="r")
    assert "LASTGOOD_STORE" in str(caught.value)
    assert "LASTGOOD_STAGING" in str(caught.value)


@pytest.mark.parametrize(
    ("value", "resume"),
    [
        ("AUTO", "auto"),
        ("latest", "latest"),
        (400, 400),
        ("400", 400),
        (0, 0),
        (Path("/nfs/x"), "/nfs/x"),
        ("file:///nfs/x", "/nfs/x"),
    ],
)
def test_resume_takes_a_mode_a_step_or_a_path(value: object, resume: object) -> None:
    assert options(resume=value).resume == resume


@given(st.dictionaries(st.sampled_from(sorted(Options.model_fields)), st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), st.binary(max_size=4),
    st.lists(st.integers(), max_size=3), st.dictionaries(st.text(max_size=3), st.floats(), max_size=2),
)))  # fmt: skip
@settings(max_examples=300, deadline=None)
def test_whatever_is_given_it_is_options_or_an_options_error(values: dict[str, Any]) -> None:
    try:
        made = Options(**{**ROOTS, **values})
    except OptionsError as error:
        assert str(error)
        assert error.__suppress_context__ or error.__context__ is None
    else:
        assert Options.model_validate(made.model_dump(mode="json")) == made


def test_every_number_has_its_unit_in_its_name() -> None:
    numbers = [name for name, field in Options.model_fields.items() if field.annotation is float]
    assert numbers
    assert all(name.endswith("_s") for name in numbers)


def test_the_options_page_is_current() -> None:
    page = Path(__file__).parents[2] / "docs" / "options.md"
    assert page.read_text() == options_page(), "run `make docs`"


def test_every_option_is_read_by_something() -> None:
    root = Path(__file__).parents[2]
    files = [path for folder in ("coordinator", "workers", "client") for path in (root / folder).rglob("*.py")]
    trees = [ast.parse(path.read_text()) for path in files if not path.name.startswith("option")]
    read = {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    through = {"staging": "staging_on"}  # resolved on each node
    assert {name for name in Options.model_fields if through.get(name, name) not in read} == set()
