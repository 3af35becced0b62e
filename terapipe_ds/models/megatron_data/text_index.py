"""Text files as the ``.bin`` and ``.idx`` files of megatron-core's ``IndexedDataset``.

A document is one file, or one line of a ``.jsonl`` file. Its tokens are followed by the token that ends a document, by
which ``GPTDataset`` tells documents apart (``reset_position_ids``, ``eod_mask_loss``).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy

from terapipe_ds.json_text import JsonError, parse_json
from terapipe_ds.messages import show_value
from terapipe_ds.models.megatron_data.needs import MegatronDataError, quiet_imports
from terapipe_ds.models.megatron_data.tokenizers import ByteTokenizer, Tokenizer

MAX_DOCUMENT_TOKENS = 2**31 - 1  # the index keeps lengths as int32


@dataclasses.dataclass(frozen=True)
class WrittenIndex:
    """What was written."""

    num_documents: int
    num_tokens: int  # ends of documents counted
    num_empty: int  # documents without text, left out


def find_files(paths: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """The files of ``paths`` in a fixed order: as given, and of a directory all text files below it, by name.

    Below a directory, names that start with a dot, linked folders and files with a NUL byte near the start are left
    out.

    Raises:
        MegatronDataError: a path does not exist, or there is no file.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        if not path.exists():
            raise MegatronDataError(f"{path} does not exist: give text files, .jsonl files, or directories of them")
        found += [file for file in _below(path) if _is_text(file)] if path.is_dir() else [path]
    if not found:
        raise MegatronDataError(f"no text in {', '.join(map(str, paths))}: give text files, or directories with some")
    return found


def write_index(
    prefix: str | os.PathLike[str],
    files: Sequence[Path],
    tokenizer: Tokenizer,
    *,
    json_key: str = "text",
    force: bool = False,
    on_bytes: Callable[[int], object] = lambda size: None,
) -> WrittenIndex:
    """Write ``PREFIX.bin`` and ``PREFIX.idx``, first under other names: what is there stays until all is written.

    Args:
        json_key: which value of a line of a ``.jsonl`` file is the text.
        force: replace files that exist.
        on_bytes: called with the number of bytes read since the last call.

    Raises:
        MegatronDataError: the files exist, there is no text, or text that the tokenizer cannot take; with place.
    """
    data, index = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    for path in (data, index):
        if path.exists() and not force:
            raise MegatronDataError(f"{path} exists: give another name, or --force to replace it")
    if not data.absolute().parent.is_dir():
        raise MegatronDataError(f"{data.parent} is no directory: give a name in one that exists")
    temporary = [path.with_name(f".{path.name}.{os.getpid()}.tmp") for path in (data, index)]
    try:
        written = _write(temporary[0], temporary[1], _documents(files, json_key, on_bytes), tokenizer)
        if written.num_documents == 0:
            raise MegatronDataError(f"no text in {len(files)} files, all are empty: give files with text")
        index.unlink(missing_ok=True)  # never an index beside data of another one
        os.replace(temporary[0], data)
        os.replace(temporary[1], index)
    finally:
        for path in temporary:
            path.unlink(missing_ok=True)
    return written


@dataclasses.dataclass(frozen=True)
class _Document:
    text: bytes | str
    place: str  # for messages


def _write(data: Path, index: Path, documents: Iterator[_Document], tokenizer: Tokenizer) -> WrittenIndex:
    with quiet_imports():
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
    builder = IndexedDatasetBuilder(str(data), dtype=DType.optimal_dtype(tokenizer.vocab_size))
    count = num_tokens = empty = 0
    try:
        for document in documents:
            tokens = _tokens(document, tokenizer)
            if len(tokens) == 1:
                empty += 1
                continue
            builder.add_document(tokens, [len(tokens)])
            count += 1
            num_tokens += len(tokens)
        builder.finalize(str(index))
    finally:
        builder.data_file.close()
    return WrittenIndex(count, num_tokens, empty)


def _tokens(document: _Document, tokenizer: Tokenizer) -> numpy.ndarray:
    """The tokens with the end of the document, int64 (bytes: uint16)."""
    try:
        if isinstance(tokenizer, ByteTokenizer):
            text = numpy.frombuffer(tokenizer.tokenize(document.text), dtype=numpy.uint8)
            tokens = numpy.append(text.astype(numpy.uint16), numpy.uint16(tokenizer.eod))
        else:
            words = document.text.decode() if isinstance(document.text, bytes) else document.text
            if getattr(tokenizer, "library", None) == "null":  # takes single blanks only
                words = " ".join(words.split())
            tokens = numpy.array([*tokenizer.tokenize(words), tokenizer.eod], dtype=numpy.int64)
    except UnicodeError as error:
        raise MegatronDataError(
            f"{document.place} is not UTF-8 text ({error}): convert it, or index bytes as they are (--tokenizer bytes)"
        ) from error
    except (ValueError, OverflowError) as error:
        raise MegatronDataError(
            f"{document.place}: the tokenizer cannot take it ({error}): give the tokenizer that the text is for"
        ) from error
    if len(tokens) > MAX_DOCUMENT_TOKENS:
        raise MegatronDataError(f"{document.place} has {len(tokens)} tokens, more than {MAX_DOCUMENT_TOKENS}: split it")
    if not 0 <= int(tokens.min()) <= int(tokens.max()) < tokenizer.vocab_size:
        raise MegatronDataError(
            f"{document.place}: token ids from {tokens.min()} to {tokens.max()} do not fit in a vocabulary of "
            f"{tokenizer.vocab_size}: give the tokenizer that the text is for"
        )
    return tokens


def _documents(files: Sequence[Path], json_key: str, on_bytes: Callable[[int], object]) -> Iterator[_Document]:
    for file in files:
        if file.suffix == ".jsonl":
            yield from _lines(file, json_key, on_bytes)
        else:
            text = file.read_bytes()
            on_bytes(len(text))
            yield _Document(text, str(file))


def _lines(file: Path, json_key: str, on_bytes: Callable[[int], object]) -> Iterator[_Document]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            on_bytes(len(line))
            if line.strip():
                yield _Document(_text_of(line, json_key, f"{file}:{number}"), f"{file}:{number}")


def _text_of(line: bytes, key: str, place: str) -> str:
    try:
        found: Any = parse_json(line)
    except JsonError as error:
        raise MegatronDataError(f"{place} is no JSON ({error}): give one object per line") from None
    if not isinstance(found, dict):
        raise MegatronDataError(f"{place} holds {show_value(found)}: give one object per line")
    if not isinstance(found.get(key), str):
        strings = [name for name, value in found.items() if isinstance(value, str)]
        known = ", ".join(map(show_value, strings[:8])) or "none"
        raise MegatronDataError(f"{place} has no text under {key!r}: give a --json-key that has (here: {known})")
    return str(found[key])


def _below(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            if not path.is_symlink():  # it may lead back up
                yield from _below(path)
        elif path.is_file():
            yield path


def _is_text(file: Path) -> bool:
    with file.open("rb") as opened:
        return b"\0" not in opened.read(4096)
