"""The layer sees every operation: Python's own audit events and the kernel (strace) tell of the same ones.

That the model of the disks ends with the very bytes that lie on the real ones is checked at every recording and kill.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from lastgood.storage.direct import PAGE_BYTES, DirectMode
from tests.crash.campaign import Recorded
from tests.crash.cluster import SHARD_BYTES
from tests.crash.memory import folder_in_memory
from tests.crash.story import CHAPTERS


def test_python_s_own_audit_events_tell_of_the_same_changes(chapters: dict[str, Recorded]) -> None:
    for chapter in chapters.values():
        assert len(chapter.heard.audited) > 20
        assert Counter(chapter.heard.audited) == Counter(chapter.heard.tried)


def test_shards_are_written_directly_and_their_tails_are_not(chapters: dict[str, Recorded]) -> None:
    with folder_in_memory() as folder, (folder / "x").open("wb") as file:
        if not DirectMode(file.fileno(), folder / "x").turn_on():
            pytest.skip("files in memory take no direct writes here: the kernel is older than 6.6")
    writes = [one for chapter in chapters.values() for one in chapter.operations if one.kind == "write"]
    shards = Counter((one.at, one.direct) for one in writes if ".safetensors." in one.path and "/staging/" in one.path)
    tail_at = SHARD_BYTES - SHARD_BYTES % PAGE_BYTES
    assert set(shards) == {(0, True), (PAGE_BYTES, True), (tail_at, False)} and len(set(shards.values())) == 1
    assert not any(one.direct for one in writes if ".safetensors." not in one.path)


_CALLS = {
    "openat": "create",
    "write": "write",
    "pwrite64": "write",
    "fsync": "fsync",
    "fdatasync": "fsync",
    "rename": "rename",
    "renameat": "rename",
    "renameat2": "rename",
    "link": "link",
    "linkat": "link",
    "unlink": "unlink",
    "unlinkat": "unlink",
    "mkdir": "mkdir",
    "mkdirat": "mkdir",
    "rmdir": "rmdir",
    "ftruncate": "truncate",
    "fallocate": "allocate",
}
_OTHER = "truncate,creat,open,writev,pwritev,pwritev2,sendfile,copy_file_range,splice,symlink,symlinkat,mknod,mknodat"
_CALL = re.compile(r"^(?:\[pid +\d+\] |\d+ +)?(\w+)\((.*)\) += (\d+)")

_TELL = """
import logging, sys
from collections import Counter
from pathlib import Path
from tests.crash import cluster, journal, operations, story
logging.disable(logging.CRITICAL)
root, images, chapters = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
seen = Counter()
def watch(operation, perform, half):
    answer = perform()
    seen[operation.kind] += 1
    return answer
cluster.steady(1)
operations.Layer(root, watch).install()
for chapter in chapters:
    story.tell(chapter, cluster.Place(root, images), journal.Journal(lambda mark: None))
print(*(f"{kind}={count}" for kind, count in seen.items()))
"""


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed here")
def test_the_kernel_sees_the_same_operations() -> None:
    from tests.crash.cluster import make_disks

    with folder_in_memory() as folder:
        root, images, log = folder / "disks", folder / "images", folder / "log"
        make_disks(root)
        images.mkdir()
        command = ["strace", "-f", "-y", "-qq", "-o", str(log), "-e", f"trace={','.join(_CALLS)},{_OTHER}"]
        told = subprocess.run(
            [*command, sys.executable, "-c", _TELL, str(root), str(images), *CHAPTERS],
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        if "ptrace" in told.stderr and told.returncode != 0:
            pytest.skip(f"processes may not be traced here: {told.stderr[:200]}")
        assert told.returncode == 0, told.stderr
        kernel, exclusive = _count(log.read_text(), str(root))
    layer = Counter({kind: int(count) for kind, count in (word.split("=") for word in told.stdout.split())})
    # An open with O_CREAT makes a file unless it stands: of the layer's creates, those with O_EXCL are sure.
    assert exclusive <= layer.pop("create") <= kernel.pop("create")
    assert kernel == layer


def _count(log: str, root: str) -> tuple[Counter[str], int]:
    """Calls that succeeded on something below the root, by the layer's kinds; and how many creates were exclusive."""
    found: Counter[str] = Counter()
    exclusive = 0
    unfinished: dict[str, str] = {}
    for line in log.splitlines():
        pid = line.split(" ", 1)[0]
        if line.endswith("<unfinished ...>"):
            unfinished[pid] = line.removesuffix("<unfinished ...>")
            continue
        if " resumed>" in line:
            line = unfinished.pop(pid, "") + line.split(" resumed>", 1)[1]
        match = _CALL.match(line)
        if match is None or root + "/" not in match[2]:
            continue
        call, arguments = match[1], match[2]
        if call == "openat":
            if "O_CREAT" in arguments:
                found["create"] += 1
                exclusive += "O_EXCL" in arguments
        elif call == "unlinkat" and "AT_REMOVEDIR" in arguments:
            found["rmdir"] += 1
        else:
            found[_CALLS.get(call, call)] += 1
    return found, exclusive
