"""The command line itself: exit codes, one message per error, and what live commands pass on."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from lastgood.client import cli, output
from lastgood.coordinator.messages import SaveState
from lastgood.storage.errors import (
    DeadlineError,
    LastgoodError,
    NotACheckpointError,
    OptionsError,
    SaveFailedError,
    UsageError,
)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A live run that answers; what it was asked lies in the dict. `error`, when set, is raised by connect."""
    asked: dict[str, Any] = {}

    class Handle:
        def wait(self, state: str, **timing: float) -> SimpleNamespace:
            asked["wait"] = (state, timing)
            return SimpleNamespace(state=SaveState(state), step=400, attempt="01JD")

    class Run:
        def save(self, tag: str | None, *, deadline_s: float | None, reason: str, from_memory: bool) -> Handle:
            asked["save"] = (tag, deadline_s, reason, from_memory)
            return Handle()

        def status(self) -> dict[str, Any]:
            return {"epoch": 3, "phase": "idle", "members": [{"member": "actor:0", "lag_s": float("nan")}]}

    def connect(run: str, *, address: str | None = None) -> Run:
        asked["connect"] = (run, address)
        if "error" in asked:
            raise asked["error"]
        return Run()

    monkeypatch.setitem(sys.modules, "lastgood.client.attach", SimpleNamespace(connect=connect))
    return asked


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, list(arguments))


def test_save_passes_on_what_was_asked_and_tells_how_far_it_came(calls: dict[str, Any]) -> None:
    done = invoke(
        "save",
        "qwen",
        "--tag",
        "pre",
        "--deadline",
        "30",
        "--wait",
        "durable",
        "--timeout",
        "60",
        "--from-memory",
        "--json",
    )
    assert done.exit_code == 0
    assert calls == {
        "connect": ("qwen", "auto"),
        "save": ("pre", 30.0, "asked for on the command line", True),
        "wait": ("durable", {"timeout_s": 60.0}),
    }
    assert json.loads(done.stdout) == {"save": {"state": "durable", "step": 400, "attempt": "01JD"}}


def test_save_waits_for_the_commit_unless_told_otherwise(calls: dict[str, Any]) -> None:
    done = invoke("save", "qwen", "--address", "10.0.0.1:6379")
    assert calls["connect"] == ("qwen", "10.0.0.1:6379")
    assert calls["wait"] == ("committed", {})
    assert done.stdout == "committed: step 400, attempt 01JD\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OptionsError("the tag is wrong"), 2),
        (UsageError("no such run"), 2),
        (NotACheckpointError("nothing there"), 1),
        (SaveFailedError("a rank was late"), 1),
        (DeadlineError("too late"), 1),
        (LastgoodError("other"), 1),
        (ConnectionError("no Ray cluster is running"), 1),
    ],
)
@pytest.mark.parametrize("command", ["save", "status"])
def test_an_error_is_one_message_on_standard_error_and_a_code(
    calls: dict[str, Any], command: str, error: Exception, code: int
) -> None:
    calls["error"] = error
    done = invoke(command, "qwen")
    assert (done.exit_code, done.stdout, done.stderr) == (code, "", f"error: {error}\n")
    done = invoke(command, "qwen", "--json")
    assert (done.exit_code, done.stdout) == (code, "")
    assert json.loads(done.stderr) == {"error": {"type": type(error).__name__, "message": str(error)}}


def test_status_is_shown_as_it_is_given(calls: dict[str, Any]) -> None:
    answer = json.loads(invoke("status", "qwen", "--json").stdout)
    members = [{"member": "actor:0", "lag_s": None}]
    assert answer == {"run": "qwen", "status": {"epoch": 3, "phase": "idle", "members": members}}
    text = invoke("status", "qwen").stdout
    assert text.startswith("run qwen, epoch 3")


def test_the_demo_gets_its_options_and_gives_its_exit_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    seen: dict[str, Any] = {}

    def run_demo(**keywords: Any) -> int:
        seen.update(keywords)
        return 1

    monkeypatch.setattr(cli, "run_demo", run_demo)
    done = invoke("demo", "--steps", "8", "--save-freq", "2", "--keep", str(tmp_path), "--json")
    assert done.exit_code == 1
    console = seen.pop("console")
    assert isinstance(console, Console)
    assert console.stderr
    assert seen == {"steps": 8, "save_freq": 2, "keep": tmp_path, "json_output": True}


@pytest.mark.parametrize(
    "arguments", [["sav"], ["save"], ["latest"], ["save", "r", "--wait", "staged"], ["save", "r", "--deadline", "-1"]]
)
def test_a_wrong_command_line_exits_2_and_touches_nothing(calls: dict[str, Any], arguments: list[str]) -> None:
    assert invoke(*arguments).exit_code == 2
    assert not calls


def test_both_outputs_implement_the_whole_surface() -> None:
    for kind in (output.TextOutput, output.JsonOutput):
        assert not kind.__abstractmethods__
        assert set(output.Output.__abstractmethods__) <= set(vars(kind))


def test_json_is_one_line_that_any_parser_reads(capsys: pytest.CaptureFixture[str]) -> None:
    said = {SaveState.STAGED: (1, {2}), "text": "a\nb \N{SNOWMAN}", "nan": float("nan"), "inf": float("inf")}
    output.JsonOutput().status("qwen", said)
    (line,) = capsys.readouterr().out.splitlines()

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    answer = json.loads(line, parse_constant=refuse)
    assert answer["status"] == {"staged": [1, [2]], "text": "a\nb \N{SNOWMAN}", "nan": None, "inf": None}


def test_the_console_script_works_in_a_fresh_process() -> None:
    def script(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "lastgood.client.cli", *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd="/", check=False)

    assert script("--version").stdout.startswith("lastgood ")
    page = script("--help").stdout
    assert all(name in page for name in ("demo", "latest", "checkpoints", "verify", "show", "save", "status"))
    missing = script("latest", "/nowhere/at/all")
    assert (missing.returncode, missing.stdout) == (1, "")
    assert missing.stderr.startswith("error: /nowhere/at/all does not exist")
    assert len(missing.stderr.splitlines()) == 1
