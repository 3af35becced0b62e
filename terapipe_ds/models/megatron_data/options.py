"""Which samples a run trains on: the options of Megatron-LM's scripts, checked."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from pathlib import Path

from terapipe_ds.json_text import is_writable
from terapipe_ds.messages import show_value
from terapipe_ds.models.megatron_data.needs import MegatronDataError

_LONGEST_PATH = 4000  # a longer one is a blend of many, and no question for a file system
Blend = tuple[list[str], list[float] | None]


@dataclasses.dataclass(frozen=True)
class DataOptions:
    """Megatron's data options, by its names where it has them.

    Args:
        data_path: a prefix of ``.bin`` and ``.idx`` files; or several prefixes; or weights and prefixes in turns, as in
            "0.7 books 0.3 code" (a string is split at blanks unless it is a prefix itself).
        sequence_length: tokens of a sample, L.
        split: shares of documents for training, validation and test.
        seed: of the order of documents and samples.
        reset_position_ids: count positions from 0 again after each end of a document. Only learned positions heed it:
            Megatron's GPT computes rotary positions from the place in the sequence.
        eod_mask_loss: the loss leaves out what is predicted from an end of a document.
        reset_attention_mask: refused, see below.
        drop_last_partial_validation_sequence: False: the last sample of the validation split may be shorter; it is
            padded and its loss mask leaves out the padding.
        cache_path: where rank 0 writes the order of samples and the others read it: a folder on a file system that
            all nodes see. None: ``PREFIX-cache`` beside the first prefix.

    Raises:
        MegatronDataError: an impossible value, or ``reset_attention_mask``.
    """

    data_path: str | Sequence[str]
    sequence_length: int
    split: str = "949,50,1"
    seed: int = 1234
    reset_position_ids: bool = False
    eod_mask_loss: bool = False
    reset_attention_mask: bool = False
    drop_last_partial_validation_sequence: bool = True
    cache_path: str | None = None

    def __post_init__(self) -> None:
        if self.reset_attention_mask:
            raise MegatronDataError(
                "reset_attention_mask: attention that ends at document borders is not there yet under token slices (a "
                "slice attends to all of its prefix), so the model would see other documents than asked for. Leave it "
                "out; reset_position_ids and eod_mask_loss work"
            )
        if type(self.sequence_length) is not int or self.sequence_length < 1:
            given = show_value(self.sequence_length)
            raise MegatronDataError(f"sequence_length = {given}: give a number of tokens >= 1")
        if type(self.seed) is not int or not 0 <= self.seed < 2**32:
            raise MegatronDataError(f"seed = {show_value(self.seed)}: give a number from 0 to 2**32 - 1")
        for name in ("reset_position_ids", "eod_mask_loss", "drop_last_partial_validation_sequence"):
            if type(getattr(self, name)) is not bool:
                raise MegatronDataError(f"{name} = {show_value(getattr(self, name))}: give True or False")
        if not isinstance(self.split, str):
            raise MegatronDataError(f"split = {show_value(self.split)}: give text, as in 949,50,1")
        paths = [self.data_path] if isinstance(self.data_path, str) else self.data_path
        if not isinstance(paths, list | tuple) or not all(map(_is_path, paths)):
            raise MegatronDataError(f"data_path = {show_value(self.data_path)}: give the path of a prefix, or several")
        if self.cache_path is not None and not _is_path(self.cache_path):
            raise MegatronDataError(f"cache_path = {show_value(self.cache_path)}: give the path of a folder, or None")
        self.shares()
        self.blend()

    def shares(self) -> tuple[float, float, float]:
        """``split`` as shares that add up to 1."""
        words = [word.strip() for word in self.split.split(",")]
        plain = all(re.fullmatch(r"\d+(\.\d*)?|\.\d+", word) for word in words)  # Megatron reads nothing else
        given = [float(word) for word in words] if plain else []
        if not 1 <= len(given) <= 3 or not 0 < sum(given) < math.inf:
            raise MegatronDataError(
                f"split = {show_value(self.split)}: give shares of training, validation and test documents, as in "
                "949,50,1"
            )
        train, valid, test = [x / sum(given) for x in given] + [0.0] * (3 - len(given))
        return train, valid, test

    def blend(self) -> Blend:
        """Prefixes, and weights where there are any."""
        words = self._words()
        if not words:
            raise MegatronDataError("data_path is empty: give the prefix of .bin and .idx files (terapipe index)")
        if len(words) % 2 == 0:
            weights = [_number(word) for word in words[::2]]
            if all(weight is not None for weight in weights):
                return words[1::2], [_weight(weight) for weight in weights]
        return words, None

    def _words(self) -> list[str]:
        if isinstance(self.data_path, str):
            whole = len(self.data_path) < _LONGEST_PATH and Path(f"{self.data_path}.idx").exists()
            return [self.data_path] if whole else self.data_path.split()
        return [str(word).strip() for word in self.data_path]


def _is_path(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value and is_writable(value)


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _weight(weight: float | None) -> float:
    if weight is None or not 0 < weight < math.inf:
        raise MegatronDataError(f"data_path has the weight {weight}: give numbers > 0, as in 0.7 books 0.3 code")
    return weight
