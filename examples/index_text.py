"""Write text as the `.bin` and `.idx` files that megatron-core's datasets read.

    python examples/index_text.py books/ --out books                                    (a token is a byte)
    python examples/index_text.py part1.jsonl part2.jsonl --json-key content --out corpus --force
    python examples/index_text.py wiki/ --tokenizer huggingface:gpt2 --out wiki
    python examples/index_text.py ids.txt --tokenizer null:50257 --out ids              (text that is token ids already)

A document is a text file, or a line of a .jsonl file; the tokenizer's end of a document follows it. Of a directory, all
text files below it are taken in the order of their names. Then train with --data-path OUT and the same --tokenizer.
Needs megatron-core: pip install megatron-core==0.16.1
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from text_data import lines_of, text_files
from tqdm import tqdm

from terapipe_ds import compat


class Written(NamedTuple):
    """What was written: documents, their tokens with the ends, and documents without text, which are left out."""

    num_documents: int
    num_tokens: int
    num_empty: int


def write_index(prefix: str | Path, files: Iterable[Path], tokenizer: Any, json_key: str = "text") -> Written:
    """Write `PREFIX.bin` and `PREFIX.idx`, first under other names: the files that are there stay until all is written.

    Raises:
        ValueError: there is no text, or text that the tokenizer cannot take; with its place.
    """
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    finals = [Path(f"{prefix}.bin"), Path(f"{prefix}.idx")]
    temporaries = [path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp") for path in finals]
    finals[0].parent.mkdir(parents=True, exist_ok=True)
    builder = IndexedDatasetBuilder(str(temporaries[0]), dtype=DType.optimal_dtype(tokenizer.vocab_size))
    num_tokens = num_empty = 0
    try:
        for place, text in documents(files, json_key):
            tokens = tokens_of(text, tokenizer, place)
            num_empty += not tokens
            if tokens:
                builder.add_document([*tokens, tokenizer.eod], [len(tokens) + 1])
                num_tokens += len(tokens) + 1
        num_documents = len(builder.sequence_lengths)
        if num_documents == 0:
            raise ValueError("there is no text, all files are empty: give files with text")
        builder.finalize(str(temporaries[1]))
        finals[1].unlink(missing_ok=True)  # never an index beside the data of another one
        for temporary, final in zip(temporaries, finals, strict=True):
            os.replace(temporary, final)
    finally:
        builder.data_file.close()
        for temporary in temporaries:
            temporary.unlink(missing_ok=True)
    return Written(num_documents, num_tokens, num_empty)


def documents(files: Iterable[Path], json_key: str) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each document."""
    for file in files:
        if file.suffix != ".jsonl":
            yield str(file), "".join(lines_of(file))
            continue
        for number, line in enumerate(lines_of(file), start=1):
            if line.strip():
                yield f"{file}:{number}", _text_of(line, json_key, f"{file}:{number}")


def _text_of(line: str, key: str, place: str) -> str:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place} is no JSON ({error}): give one object per line") from None
    if not isinstance(document, dict) or not isinstance(document.get(key), str):
        raise ValueError(f"{place} has no text under {key!r}: give objects that have it, or another --json-key")
    return document[key]


def tokens_of(text: str, tokenizer: Any, place: str) -> list[int]:
    """Return the tokens of a document, without its end."""
    try:
        # the library of "null:N" takes single blanks only
        tokens = tokenizer.tokenize(" ".join(text.split()) if tokenizer.library == "null" else text) if text else []
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{place}: the tokenizer cannot take it ({error}): give the tokenizer of the text") from error
    if tokens and not 0 <= min(tokens) <= max(tokens) < tokenizer.vocab_size:
        raise ValueError(
            f"{place}: token ids from {min(tokens)} to {max(tokens)} do not fit in a vocabulary of "
            f"{tokenizer.vocab_size}: give the tokenizer of the text"
        )
    return tokens


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", metavar="PATH", help="text files, .jsonl files, directories of them")
    parser.add_argument("--out", required=True, metavar="OUT", help="write OUT.bin and OUT.idx")
    names = "bytes (default), huggingface:NAME_OR_FOLDER, sentencepiece:FILE, tiktoken:FILE or null:N"
    parser.add_argument("--tokenizer", default="bytes", metavar="NAME", help=names)
    parser.add_argument("--json-key", default="text", metavar="KEY", help="the text of a .jsonl line (default: text)")
    parser.add_argument("--force", action="store_true", help="replace OUT.bin and OUT.idx where they exist")
    args = parser.parse_args(arguments)
    try:
        compat.require_megatron("examples/index_text.py")
        from megatron_data import build_tokenizer

        for path in (Path(f"{args.out}.bin"), Path(f"{args.out}.idx")):
            if path.exists() and not args.force:
                raise ValueError(f"{path} exists: give another --out, or --force to replace it")
        files = list(text_files(args.paths))
        tokenizer = build_tokenizer(args.tokenizer)
        bar = tqdm(files, desc="indexing", unit="files", disable=None, leave=False)
        written = write_index(args.out, bar, tokenizer, args.json_key)
    except (ValueError, OSError, compat.MissingExtraError) as error:
        sys.exit(f"index_text.py: error: {error}")
    empty = f"; {written.num_empty} empty ones left out" if written.num_empty else ""
    print(f"{args.out}.bin, {args.out}.idx: {written.num_documents} documents, {written.num_tokens} tokens{empty}")
    print(f"tokenizer {args.tokenizer}: vocabulary {tokenizer.vocab_size}, end of document {tokenizer.eod}")


if __name__ == "__main__":
    main()
