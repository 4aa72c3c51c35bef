"""Random number streams of a process. The rule: all of them, restored last, so that no restore draws from them.

python's `random`, numpy's global stream, torch on CPU and on every visible accelerator, and generators of the user's.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch

from ..storage.errors import UsageError
from .component import Differences, LoadContext, Tree, private_copy
from .small_state import SmallState

Generator = torch.Generator | np.random.Generator | random.Random


class RNG:
    """Stands for all random streams of the process in a member's state.

    Keyword arguments add the user's own: torch.Generator, numpy.random.Generator or random.Random objects.
    """

    def __init__(self, **generators: Generator) -> None:
        for name, generator in generators.items():
            if not isinstance(generator, Generator) or isinstance(generator, random.SystemRandom):
                raise UsageError(
                    f"RNG: {name} is a {type(generator).__name__}, which has no state to keep. Nothing was touched; "
                    "pass torch.Generator, numpy.random.Generator or random.Random objects.",
                    name=name,
                )
        self.generators = dict(generators)


class RngState(SmallState):
    """{"python", "numpy", "torch", "devices": {type: [state per device]}, "generators": {name: state}}"""

    kind: ClassVar[str] = "rng"
    order: ClassVar[int] = 90

    def __init__(self, rng: RNG, where: str) -> None:
        super().__init__(where)
        self.generators = rng.generators

    def read(self) -> Tree:
        return {
            "python": _python_state(random.getstate()),
            "numpy": private_copy(np.random.get_state(legacy=False)),
            "torch": torch.get_rng_state(),
            "devices": _device_states(),
            "generators": {name: generator_state(generator) for name, generator in sorted(self.generators.items())},
        }

    def prepare(self, loaded: Tree, context: LoadContext) -> Tree:
        differences = Differences(context)
        differences.keys(loaded["generators"], self.generators, "generators.")
        _compare_generator(loaded["numpy"], np.random.get_state(legacy=False), "numpy", differences)
        for name in loaded["generators"].keys() & self.generators.keys():
            live = generator_state(self.generators[name])
            _compare_generator(loaded["generators"][name], live, f"generators.{name}", differences)
        devices = {kind: len(states) for kind, states in loaded["devices"].items()}
        if context.allows("devices"):
            loaded = {**loaded, "devices": {}}
        elif devices and devices != _device_counts():
            differences.add("devices", devices, _device_counts())
        differences.raise_if_any()
        return private_copy(loaded)

    def apply(self, prepared: Tree) -> None:
        for kind, states in prepared["devices"].items():
            module = torch.get_device_module(kind)
            if hasattr(module, "set_rng_state_all"):
                module.set_rng_state_all(states)
            else:
                module.set_rng_state(states[0])
        for name, state in prepared["generators"].items():
            set_generator_state(self.generators[name], state)
        torch.set_rng_state(prepared["torch"])
        np.random.set_state(prepared["numpy"])
        random.setstate(_python_state_back(prepared["python"]))
        self.forget()


def generator_state(generator: Generator) -> Tree:
    """The state of one generator object as a private tree."""
    if isinstance(generator, torch.Generator):
        return {"kind": f"torch {generator.device.type}", "state": generator.get_state()}
    if isinstance(generator, np.random.Generator):
        state = private_copy(dict(generator.bit_generator.state))
        return {"kind": f"numpy {state['bit_generator']}", "state": state, "seeds": _seeds(generator)}
    return {"kind": "python", "state": _python_state(generator.getstate())}


def set_generator_state(generator: Generator, saved: Tree) -> None:
    """Restores what generator_state answered."""
    if isinstance(generator, torch.Generator):
        generator.set_state(saved["state"])
    elif isinstance(generator, np.random.Generator):
        if saved.get("seeds") is not None:  # spawn() draws from these, and the state does not hold them
            seeds = np.random.SeedSequence(**saved["seeds"])
            bits: Any = generator.bit_generator
            bits.__setstate__((bits.state, seeds))
        generator.bit_generator.state = saved["state"]
    else:
        generator.setstate(_python_state_back(saved["state"]))


def _seeds(generator: np.random.Generator) -> Tree:
    """Where the next spawn() of the generator goes on; None when it cannot spawn."""
    seeds = generator.bit_generator.seed_seq
    return private_copy(dict(seeds.state)) if type(seeds) is np.random.SeedSequence else None


def _python_state(state: tuple[Any, ...]) -> Tree:
    version, words, gauss = state
    return {"version": version, "words": np.array(words, dtype=np.uint32), "gauss": gauss}


def _python_state_back(saved: Mapping[str, Any]) -> tuple[Any, ...]:
    return (saved["version"], tuple(int(word) for word in saved["words"]), saved["gauss"])


def _compare_generator(saved: Mapping[str, Any], live: Mapping[str, Any], name: str, differences: Differences) -> None:
    key = "kind" if "kind" in live else "bit_generator"
    if saved[key] != live[key]:
        differences.add(name, saved[key], live[key])


def _device_states() -> dict[str, list[torch.Tensor]]:
    """The default generators of all visible devices; none while the process has not used its accelerator."""
    kind = _accelerator()
    if kind is None:
        return {}
    module = torch.get_device_module(kind)
    if not getattr(module, "is_initialized", lambda: True)():
        return {}
    if hasattr(module, "get_rng_state_all"):
        return {kind: [state.clone() for state in module.get_rng_state_all()]}
    return {kind: [module.get_rng_state().clone()]}


def _device_counts() -> dict[str, int]:
    kind = _accelerator()
    if kind is None:
        return {}
    module = torch.get_device_module(kind)
    return {kind: torch.accelerator.device_count() if hasattr(module, "set_rng_state_all") else 1}


def _accelerator() -> str | None:
    device = torch.accelerator.current_accelerator(check_available=True)
    return device.type if device is not None else None
