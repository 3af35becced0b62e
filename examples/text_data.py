"""Text files as training samples, without a tokenizer: a token is one byte, the vocabulary has 256 entries.

Every rank builds the same corpus. Which window of it a sample is follows from (seed, sample number) alone, so
that nothing has to be sent between ranks, data-parallel replicas never see each other's samples, and a
resumed run goes on with the sample at which the first one stopped.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

VOCAB_SIZE = 256
_NOT_CORPUS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}

Batch = tuple[Tensor, Tensor]  # inputs, labels: both [B, L] int64, labels one byte ahead


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The bytes of all files, cut once: what lies before the cut trains, what lies behind it validates."""

    train: Tensor  # [bytes] uint8
    validation: Tensor
    num_files: int

    @classmethod
    def load(cls, paths: Sequence[str] = (), *, max_bytes: int, validation_fraction: float = 0.05) -> Corpus:
        """Read at most ``max_bytes`` of ``paths``: files, or directories with all the text files in them.

        Without paths: the source text of Python's own standard library, which is on every machine.

        Raises:
            ValueError: a path does not exist, or there is no text; the message ends with what to give.
        """
        files = text_files(paths) if paths else standard_library()
        pieces, size = [], 0
        for file in files:
            if size >= max_bytes:
                break
            with file.open("rb") as opened:
                pieces.append(opened.read(max_bytes - size))
            size += len(pieces[-1])
        if size < 2:
            raise ValueError(f"no text in {list(paths)}: give --data text files, or directories that have some")
        tokens = torch.frombuffer(bytearray(b"".join(pieces)), dtype=torch.uint8)
        cut = size - int(size * validation_fraction)
        return cls(train=tokens[:cut], validation=tokens[cut:], num_files=len(pieces))


def training_batches(
    tokens: Tensor,
    sequence_length: int,
    micro_batch_size: int,
    *,
    seed: int,
    replica_id: int = 0,
    num_replicas: int = 1,
    first_micro_batch: int = 0,
) -> Iterator[Batch]:
    """Random windows of ``tokens`` for one data-parallel replica, without end.

    Args:
        first_micro_batch: how many micro-batches each replica has used already; a resumed run starts there.
    """
    starts = number_of_windows(tokens, sequence_length)
    while True:
        sample = (first_micro_batch * num_replicas + replica_id) * micro_batch_size
        draws = [random.Random(f"{seed} {sample + row}").random() for row in range(micro_batch_size)]
        yield _batch(tokens, [int(draw * starts) for draw in draws], sequence_length)
        first_micro_batch += 1


def validation_batches(
    tokens: Tensor,
    sequence_length: int,
    micro_batch_size: int,
    num_micro_batches: int,
    *,
    replica_id: int = 0,
    num_replicas: int = 1,
) -> Iterator[Batch]:
    """The same samples every time: windows spread evenly over ``tokens`` and shared out to the replicas."""
    total = num_micro_batches * num_replicas * micro_batch_size
    starts = number_of_windows(tokens, sequence_length)
    for micro_batch in range(num_micro_batches):
        sample = (micro_batch * num_replicas + replica_id) * micro_batch_size
        yield _batch(tokens, [(sample + r) * starts // total for r in range(micro_batch_size)], sequence_length)


def _batch(tokens: Tensor, starts: Iterable[int], sequence_length: int) -> Batch:
    windows = torch.stack([tokens[start : start + sequence_length + 1] for start in starts]).long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def number_of_windows(tokens: Tensor, sequence_length: int) -> int:
    """Return how many sequences a text has, one from each byte on. Raises ValueError if it has none."""
    windows = len(tokens) - sequence_length  # a window has one byte more than the sequence: the last label
    if windows < 1:
        raise ValueError(
            f"{len(tokens)} bytes of text are too few for sequences of {sequence_length}: give more --data, "
            f"a shorter --sequence-length or, where it is the validation text, a larger --validation-fraction"
        )
    return windows


def text_files(paths: Sequence[str]) -> Iterator[Path]:
    """Yield the files of `paths` as given, and of a directory all text files below it by name, but no hidden ones.

    Raises:
        ValueError: a path does not exist.
    """
    for path in map(Path, paths):
        if not path.exists():
            raise ValueError(f"{path} does not exist: give files, or directories of them")
        if not path.is_dir():
            yield path
            continue
        for file in sorted(path.rglob("*")):
            hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
            if file.is_file() and not hidden and _is_text(file):
                yield file


def _is_text(file: Path) -> bool:
    with file.open("rb") as opened:
        return b"\0" not in opened.read(4096)


def lines_of(file: Path) -> Iterator[str]:
    """Yield the lines of a text file. Line feeds alone end them: JSON may hold what else splits lines in Python.

    Raises:
        ValueError: a line is not UTF-8.
    """
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")  # a file may begin with a byte-order mark
            except UnicodeDecodeError as error:
                raise ValueError(f"{file} is not UTF-8 text: {error.reason} in line {number}; convert it") from error


def standard_library() -> list[Path]:
    """The library's modules, mixed in an order that depends on their names alone."""
    root = Path(os.__file__).parent
    modules = [p.relative_to(root) for p in root.rglob("*.py")]
    kept = [m for m in modules if not _NOT_CORPUS & set(m.parts)]
    return [root / m for m in sorted(kept, key=lambda m: hashlib.sha256(m.as_posix().encode()).digest())]
