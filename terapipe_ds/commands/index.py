"""``terapipe index``: text as the .bin and .idx files that megatron-core's datasets read."""

from __future__ import annotations

import argparse

HELP = "make the .bin and .idx files of megatron-core from text"
DESCRIPTION = (
    "Write OUT.bin and OUT.idx, the files that megatron-core's GPTDataset reads: one document per text file, or per\n"
    "line of a .jsonl file, each followed by the token that ends a document.\n"
    "Needs megatron-core: pip install 'terapipe_ds[megatron]'"
)
EXAMPLES = """\
  terapipe index books/ --out books                             (bytes: a vocabulary of 257)
  terapipe index part1.jsonl part2.jsonl --json-key content --out corpus --force
  terapipe index wiki/ --tokenizer sentencepiece:llama.model --out wiki
  terapipe index wiki/ --tokenizer huggingface:gpt2 --out wiki
  terapipe index ids.txt --tokenizer null:50257 --out ids       (text that is token ids already)

Of a directory, all text files below it are taken in the order of their names; hidden and binary files are left out.
Then train with --data-path OUT and the same tokenizer.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("paths", nargs="+", metavar="PATH", help="text files, .jsonl files, directories of them")
    parser.add_argument("--out", required=True, metavar="OUT", help="write OUT.bin and OUT.idx")
    parser.add_argument(
        "--tokenizer",
        default="bytes",
        metavar="NAME",
        help="bytes (default), huggingface:NAME_OR_FOLDER, sentencepiece:FILE, tiktoken:FILE or null:N",
    )
    parser.add_argument("--json-key", default="text", metavar="KEY", help="the text of a .jsonl line (default: text)")
    parser.add_argument("--force", action="store_true", help="replace OUT.bin and OUT.idx where they exist")


def run(arguments: argparse.Namespace) -> None:
    """Write the two files, and say what is in them."""
    from terapipe_ds.models.megatron_data.needs import quiet_imports
    from terapipe_ds.models.megatron_data.text_index import find_files, write_index
    from terapipe_ds.models.megatron_data.tokenizers import build_tokenizer

    files = find_files(arguments.paths)
    with quiet_imports():
        tokenizer = build_tokenizer(arguments.tokenizer)
    from tqdm import tqdm

    size = sum(file.stat().st_size for file in files)
    with tqdm(total=size, desc="indexing", unit="B", unit_scale=True, disable=None, leave=False) as bar:
        written = write_index(
            arguments.out, files, tokenizer,
            json_key=arguments.json_key, force=arguments.force, on_bytes=bar.update,
        )  # fmt: skip
    content = f"{written.num_documents} documents, {written.num_tokens} tokens"
    empty = f"; {written.num_empty} empty ones left out" if written.num_empty else ""
    print(f"{arguments.out}.bin, {arguments.out}.idx: {content}{empty}")
    print(f"tokenizer {arguments.tokenizer}: vocabulary {tokenizer.vocab_size}, end of document {tokenizer.eod}")
