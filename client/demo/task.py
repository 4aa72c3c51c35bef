"""The task: add two digits. Its tokenizer (one token per character), its samples, its rule-based reward.

The rule looks at the text alone, so a reward can be checked by hand; samples come through torchdata's
StatefulDataLoader, whose place in the data is part of the trainer's checkpoint.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler

PAD, BEGIN, END = 0, 1, 2
_SPECIAL = ("<pad>", "<s>", "</s>")
_CHARACTERS = "0123456789+="

WELL_FORMED = 0.2  # reward for any number that is ended properly
CLOSENESS = 0.3  # on top, falling linearly to nothing at a distance of 10
EXACT = 1.0


class Tokenizer:
    """Characters to token ids and back. Ids 0 to 2 are pad, begin and end."""

    def __init__(self) -> None:
        self._ids = {character: i for i, character in enumerate(_CHARACTERS, start=len(_SPECIAL))}
        self.size = len(_SPECIAL) + len(_CHARACTERS)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without begin or end. Raises KeyError for a character outside the vocabulary."""
        return [self._ids[character] for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; special tokens are spelled out, so that a malformed answer stays visible."""
        return "".join(_SPECIAL[i] if i < len(_SPECIAL) else _CHARACTERS[i - len(_SPECIAL)] for i in ids)

    def prompt(self, left: int, right: int) -> list[int]:
        """The prompt for one sum of two digits: always 5 tokens, so a batch needs no padding."""
        return [BEGIN, *self.encode(f"{left}+{right}=")]


@dataclass(frozen=True)
class Sample:
    """One sum to solve. `identity` is its number in the data set."""

    identity: int
    left: int
    right: int


class AdditionDataset(Dataset[Sample]):
    """All sums of two digits from 1 to 9: 81 samples, so that a run of a dozen steps crosses an epoch's end."""

    def __len__(self) -> int:
        return 81

    def __getitem__(self, index: int) -> Sample:
        return Sample(index, index // 9 + 1, index % 9 + 1)


def make_loader(batch_size: int, seed: int) -> StatefulDataLoader:
    """Shuffled batches (lists of Sample) in this process; a short last batch is dropped.

    The order has a generator of its own. With `shuffle=True, generator=g` torchdata draws a seed for its workers from
    the same `g` at every new epoch but not after load_state_dict, so the epoch after a resume would be shuffled
    differently (torchdata 0.11).
    """
    data = AdditionDataset()
    order = RandomSampler(data, generator=torch.Generator().manual_seed(seed))
    unused = torch.Generator().manual_seed(seed)  # for worker seeds, so that nothing draws from the global generator
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="'set_vital'")  # torchdata calls what torch has deprecated
        return StatefulDataLoader(
            data, batch_size=batch_size, sampler=order, drop_last=True, collate_fn=list, generator=unused, num_workers=0
        )


class SampleStream:
    """Batches without end: one epoch after the other. Made again after the loader's state was restored."""

    def __init__(self, loader: StatefulDataLoader) -> None:
        self._loader = loader
        self._epoch = None

    def take(self) -> list[Sample]:
        """The next batch."""
        while True:
            if self._epoch is None:
                self._epoch = iter(self._loader)
            try:
                return next(self._epoch)
            except StopIteration:
                self._epoch = None


def reward(response: str, answer: int) -> float:
    """What `response` (decoded, special tokens spelled out) earns for a sum whose value is `answer`; 0 to 1.

    A number ended by `</s>` is well formed. The right one earns 1, another well-formed one something for its form and
    for being close, everything else nothing.
    """
    text, end, rest = response.partition(_SPECIAL[END])
    if not end or not (text.isascii() and text.isdigit()) or rest.replace(_SPECIAL[PAD], ""):
        return 0.0
    if text == str(answer):
        return EXACT
    return WELL_FORMED + CLOSENESS * max(0.0, 1.0 - abs(int(text) - answer) / 10)
