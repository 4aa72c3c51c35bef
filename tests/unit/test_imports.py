"""Imports point one way, Ray and torch stay where they are needed, and the face holds exactly the public names.

Read from the source by `ast`, so a forbidden import inside a function is found too.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("storage", "coordinator", "workers", "client")  # each may import itself and what stands before it

# What workers/ may take from coordinator/: words and settings, no decision.
FOR_WORKERS = {"messages", "names", "node_socket", "options", "ports", "ray_names"}

# Every file that may import Ray; each is thin. What decides something is tested without a cluster.
RAY_FILES = {
    "coordinator/actor.py",
    "workers/install.py",
    "workers/ray_link.py",
    "workers/stager_actor.py",
    "client/attach.py",
    "client/link.py",
    "client/member.py",
    "client/run.py",
    "coordinator/ray_names.py",
    "client/demo/cluster.py",
    "client/demo/ranks.py",
}

# Modules that could run what they read.
UNSAFE = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
BETWEEN_LIVE_PROCESSES = {
    "coordinator/node_socket.py"
}  # of one user, as Ray's own calls: nothing that was kept is read


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute module) of every import in a file of the package; `from . import x` gives the module of x."""
    package = ("lastgood", *path.relative_to(ROOT).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            if node.module is None or f"lastgood.{node.module}" in {f"lastgood.{folder}" for folder in FOLDERS}:
                yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, module


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def test_imports_point_one_way() -> None:
    wrong = []
    for path in sources(*FOLDERS):
        folder = path.relative_to(ROOT).parts[0]
        allowed = FOLDERS[: FOLDERS.index(folder) + 1]
        for line, module in imports(path):
            parts = module.split(".")
            if parts[0] == "lastgood" and len(parts) > 1 and parts[1] in FOLDERS and parts[1] not in allowed:
                wrong.append(f"{where(path, line)}: {folder}/ imports {module}")
    assert not wrong


def test_workers_take_only_messages_and_settings_from_the_coordinator() -> None:
    wrong = []
    for path in sources("workers"):
        for line, module in imports(path):
            parts = module.split(".")
            if parts[:2] == ["lastgood", "coordinator"] and (len(parts) < 3 or parts[2] not in FOR_WORKERS):
                wrong.append(f"{where(path, line)}: imports {module}")
    assert not wrong


def test_imports_between_the_folders_are_relative() -> None:
    """`import storage.x` would load a second copy; `import lastgood.x` would tie a file to an installed name."""
    wrong = []
    for path in sources(*FOLDERS):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            if "demo" in path.parts:  # an example: it uses the face as users do
                names = [name for name in names if name != "lastgood"]
            if any(name.split(".")[0] in ("lastgood", *FOLDERS) for name in names):
                wrong.append(where(path, getattr(node, "lineno", 0)))
    assert not wrong


def test_ray_is_imported_in_few_named_files_only() -> None:
    found = {
        path.relative_to(ROOT).as_posix()
        for path in sources(*FOLDERS)
        if any(module.split(".")[0] == "ray" for _, module in imports(path))
    }
    assert found <= RAY_FILES


def test_nothing_imports_what_could_run_what_it_reads() -> None:
    wrong = [
        where(path, line)
        for path in sources(*FOLDERS)
        for line, module in imports(path)
        if module.split(".")[0] in UNSAFE and path.relative_to(ROOT).as_posix() not in BETWEEN_LIVE_PROCESSES
    ]
    assert not wrong


def loaded_by(code: str) -> set[str]:
    """Names of the top-level modules that a fresh Python has loaded after `code`."""
    code += "\nimport sys; sys.stderr.write(' '.join({name.split('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/", check=True)
    return set(done.stderr.split())


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import lastgood; dir(lastgood); lastgood.errors", {"torch", "ray", "numpy", "pydantic", "rich"}),
        ("import lastgood.coordinator.options", {"torch", "ray", "numpy"}),
        ("import lastgood.storage.manifest, lastgood.storage.layout, lastgood.storage.verify", {"torch", "ray"}),
        ("import lastgood.client.cli", {"torch", "ray", "pydantic"}),
        ("import lastgood.client.at_rest", {"torch", "ray"}),
        ("import lastgood.workers.stager", {"torch", "ray"}),
        ("import lastgood.workers.stager_actor", {"torch"}),
    ],
)
def test_what_starts_small_stays_small(code: str, heavy: set[str]) -> None:
    assert not loaded_by(code) & heavy


def test_help_and_version_need_neither_torch_nor_ray() -> None:
    for arguments in (["--help"], ["--version"], ["save", "--help"], ["verify", "--help"]):
        code = (
            f"import sys; sys.argv = ['lastgood', *{arguments!r}]\n"
            "from lastgood.client.cli import main\n"
            "try:\n    main()\nexcept SystemExit as done:\n    assert not done.code"
        )
        assert not loaded_by(code) & {"torch", "ray", "numpy"}


def test_the_face_holds_exactly_the_public_names() -> None:
    import lastgood

    assert set(lastgood.__all__) == {
        "RNG",
        "Checkpoint",
        "LedMember",
        "Options",
        "Restored",
        "Run",
        "SaveHandle",
        "Value",
        "__version__",
        "attach",
        "connect",
        "errors",
        "member",
        "register_enum",
    }
    assert dir(lastgood) == sorted(lastgood.__all__)
    missing = [name for name in lastgood.__all__ if getattr(lastgood, name, None) is None]
    assert not missing


def test_an_unknown_public_name_lists_those_that_exist() -> None:
    import lastgood

    with pytest.raises(AttributeError, match=r"no attribute 'atach'.*attach"):
        _ = lastgood.atach


# What the stager consists of. The rest of workers/ is for the members' processes, which have torch anyway.
WITHOUT_TORCH = {"stager", "stager_actor", "images", "disk", "orders", "processes"}


def test_coordinator_and_stager_never_load_torch() -> None:
    """Not one of their modules, so no path through them can allocate on a device or run a collective."""
    modules = [
        f"lastgood.{path.relative_to(ROOT).with_suffix('').as_posix().replace('/', '.')}"
        for path in sources("coordinator", "storage", "workers")
        if path.stem != "__init__" and (path.parent.name != "workers" or path.stem in WITHOUT_TORCH)
    ]
    modules.remove("lastgood.storage.tensors")  # how a tensor becomes bytes: for the members' processes
    assert len(modules) > 40
    assert "torch" not in loaded_by(f"import {', '.join(modules)}")


# Calls that wait for other ranks. A method of one of these names on any object counts, so that no alias hides it.
COLLECTIVES = re.compile(
    r"all_reduce\w*|all_gather\w*|all_to_all\w*|(all_)?gather_object|broadcast(_object_list|_coalesced)?|barrier|"
    r"monitored_barrier|reduce_scatter\w*|scatter_object_list|init_process_group|new_group|init_device_mesh|"
    r"full_tensor|redistribute|unshard|summon_full_params|get_model_state_dict|get_optimizer_state_dict"
)
OF_DISTRIBUTED = {"gather", "scatter", "reduce", "send", "recv", "isend", "irecv", "wait"}  # other modules have these
ON_A_DEVICE = {"cuda", "to_empty", "pin_memory"}  # methods that allocate there, or through the device's driver


def waits_for_others(source: str) -> list[str]:
    """Calls in a source that would wait for other ranks or allocate on a device."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        base = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        distributed = base.split(".")[-1] in ("dist", "distributed")
        if COLLECTIVES.fullmatch(name) or (distributed and name in OF_DISTRIBUTED) or (base and name in ON_A_DEVICE):
            found.append(f"{node.lineno}: {ast.unparse(node.func)}")
        empty = bool(node.args) and ast.unparse(node.args[0]) == "0"  # a tensor without elements: a view is made of it
        for keyword in node.keywords:
            if not empty and keyword.arg == "device" and ast.unparse(keyword.value).strip("'\"") not in ("cpu", "meta"):
                found.append(f"{node.lineno}: {ast.unparse(node.func)}(device={ast.unparse(keyword.value)})")
    return found


def test_nothing_in_the_service_s_path_runs_a_collective_or_allocates_on_a_device() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{call}"
        for path in sources("storage", "coordinator", "workers", "client")
        if "demo" not in path.parts
        for call in waits_for_others(path.read_text())
    ]
    assert not wrong


@pytest.mark.parametrize(
    "source",
    [
        "torch.distributed.barrier()",
        "dist.all_gather_object(a, b)",
        "from torch.distributed import broadcast\nbroadcast(x, 0)",
        "dist.reduce(x, 0)",
        "weight.full_tensor()",
        "weight.cuda()",
        "torch.empty(3, device=weight.device)",
    ],
)
def test_the_search_for_collectives_finds_what_it_is_for(source: str) -> None:
    assert len(waits_for_others(source)) == 1
