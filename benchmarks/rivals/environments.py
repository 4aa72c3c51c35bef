"""A rival's own environment under build/rivals/, made on first use: the project's packages lie behind its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[2]
INSTALL_S = 900.0  # for one command that makes an environment

# Everything that a rival needs beyond the project's own packages; pip chooses nothing, so torch stays as it is.
PINS = {
    "torch-checkpointing": "torch-checkpointing==0.1.1",
    "torchsnapshot": "torchsnapshot==0.1.0 aiofiles==25.1.0 importlib-metadata==8.7.1 nest-asyncio==1.6.0 psutil==7.2.2"
    " zipp==4.1.2",
    "dlrover": "dlrover==0.6.1 deprecated==1.3.1 nvidia-ml-py==13.615.71 psutil==7.2.2 pynvml==13.0.1",
    "lm-resiliency": "lm-resiliency==0.2.0",
    "moonclip": "moonclip==0.3.1",
    "orbax": "orbax-checkpoint==0.12.8 jax==0.10.2 jaxlib==0.10.2 tensorstore==0.1.86 absl-py==2.5.1 aiofiles==25.1.0"
    " etils==1.15.0 humanize==4.17.0 ml_dtypes==0.6.0 opt_einsum==3.4.0 psutil==7.2.2 scipy==1.17.1 simplejson==4.3.0"
    " uvloop==0.23.0 zipp==4.1.2",
}


class RivalError(Exception):
    """A rival cannot be measured; the text says why in one sentence."""


def environment(rival: str) -> Path:
    """The Python of a rival's environment, made unless it is there with these versions. Waits INSTALL_S a command."""
    home = ROOT / "build" / "rivals" / rival
    python, made = home / "bin" / "python", home / "made-with.txt"
    wanted = f"{sysconfig.get_path('purelib')} {PINS[rival]}"
    if made.exists() and made.read_text() == wanted:
        return python
    shutil.rmtree(home, ignore_errors=True)
    _called([sys.executable, "-m", "venv", "--without-pip", str(home)])
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "install", "--quiet"]
    _called([*pip, "--no-deps", *PINS[rival].split()])
    # Only now, so that pip neither finds nor touches the project's own packages. Its .pth files count too.
    packages = next(home.glob("lib/python*/site-packages"))
    line = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    (packages / "behind.pth").write_text(line)
    made.write_text(wanted)
    return python


def _called(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_S)
    except subprocess.TimeoutExpired:
        raise RivalError(f"its environment was not made within {INSTALL_S:g} s") from None
    except subprocess.CalledProcessError as error:
        raise RivalError(f"its environment cannot be made: {last_line(error.stderr)}") from None


def last_line(output: str) -> str:
    """What a program said last: mostly why it failed."""
    lines = [line.strip() for line in output.splitlines() if line.strip() and "WARNING" not in line]
    return lines[-1][:300] if lines else "it said nothing"
