"""megatron-core's data for pretrain_gpt_megatron.py: tokenizers, datasets over `.bin` and `.idx` files, micro-batches.

Sample n of a split is a fixed window of L + 1 tokens: the documents of the split in a random order, over all epochs,
cut every L tokens, and these windows in a random order. Rank 0 works that out once and writes it to a cache, which the
other ranks read after a barrier. Which samples a micro-batch has follows from how many samples the run has used and
from the replica alone, as in Megatron's sequential sampler. So nothing is sent between ranks, replicas share no sample,
and a resumed run goes on where the first one stopped, also with another number of replicas.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import get_blend_from_list
    from megatron.core.tokenizers import MegatronTokenizer

LIBRARIES = ("huggingface", "sentencepiece", "tiktoken")
SPLITS = ("training", "validation", "test")

MicroBatch = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]
"""((tokens, position_ids), (labels, loss_mask)): all [B, L]; int64, loss_mask float32 with 0 or 1."""


def build_tokenizer(name: str) -> Any:
    """Return one of megatron-core's tokenizers: `bytes`, `null:N` (text of token ids below N), or LIBRARY:PATH.

    Raises:
        ValueError: there is no such tokenizer, it cannot be loaded, or it has no token that ends a document.
    """
    library, _, path = name.partition(":")
    options: dict[str, int] = {}
    if name == "bytes":  # megatron-core's usual ids would give bytes 0 and 1 a second meaning
        library, options = "byte-level", {"vocab_size": 257, "_eos_id": 256, "_pad_id": -1}
    elif library == "null" and path.isdecimal():
        path, options = "", {"vocab_size": int(path)}
    elif library not in LIBRARIES or not path:
        known = ", ".join(f"{library}:PATH" for library in LIBRARIES)
        raise ValueError(f"tokenizer {name!r}: give bytes, null:N, {known}")
    try:
        tokenizer = MegatronTokenizer.from_pretrained(path or None, {"library": library}, **options)
        end = tokenizer.eod
    except Exception as error:  # whatever the library raises
        raise ValueError(f"tokenizer {name!r} cannot be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(end, int) or end < 0:
        raise ValueError(f"tokenizer {name!r} has no token that ends a document: give one with an end-of-text token")
    return tokenizer


def build_datasets(
    args: argparse.Namespace, data_path: Sequence[str], tokenizer: Any, num_samples: Sequence[int], reads: bool
) -> list[Any]:
    """Return the datasets for training, validation and test, with None where 0 samples are asked for. A collective.

    Args:
        args: of `megatron_arguments`: --seq-length, --split, --seed and the other options of data.
        data_path: prefixes of `.bin` and `.idx` files, or weights and prefixes in turns.
        num_samples: of each split, over all replicas and steps.
        reads: False on ranks that draw no data, whose datasets are None too; True on rank 0, which writes the cache.

    Raises:
        ValueError: a file or an option does not fit, or a split has too few samples.
    """
    prefixes, weights = get_blend_from_list([word.strip() for word in data_path])
    if weights is not None and not all(0 < weight < math.inf for weight in weights):
        raise ValueError(f"--data-path has the weights {weights}: give numbers > 0, as in 0.7 books 0.3 code")
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=(prefixes, weights),
        split=args.split,
        tokenizer=tokenizer,
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=False,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=False,  # sliced attention is causal by itself
    )
    for prefix in prefixes:
        _check_files(prefix, config, num_samples)
    config.path_to_cache = str(_cache_folder(args.data_cache_path, prefixes))
    for index, wanted in enumerate(num_samples):
        if wanted == 0:
            config.split_matrix[index] = None  # megatron-core would build it
    datasets = BlendedMegatronDatasetBuilder(GPTDataset, list(num_samples), lambda: reads, config).build()
    for split, dataset, wanted in zip(SPLITS, datasets, num_samples, strict=True):
        if dataset is not None and len(dataset) < wanted:
            raise ValueError(
                f"{split} has {len(dataset)} samples, {wanted} were asked for: prefixes without weights give one "
                "epoch. Give weights, as in 0.7 books 0.3 code"
            )
    return datasets


def _check_files(prefix: str, config: GPTDatasetConfig, num_samples: Sequence[int]) -> None:
    """Refuse files that do not belong together, and empty splits, whose epochs megatron-core would count for ever."""
    for suffix in (".bin", ".idx"):
        if not Path(prefix + suffix).is_file():
            raise ValueError(
                f"{prefix}{suffix} does not exist: give the path without .bin and .idx, or make both from text with "
                "examples/index_text.py"
            )
    try:
        indexed = IndexedDataset(prefix)
        lengths = indexed.sequence_lengths
        num_bytes = int(lengths.sum(dtype="int64")) * indexed.index.dtype_size
    except (AssertionError, ValueError, KeyError) as error:
        raise ValueError(f"{prefix}.idx is no index of {prefix}.bin ({error}): make both anew") from error
    if num_bytes != (size := Path(f"{prefix}.bin").stat().st_size):
        raise ValueError(f"{prefix}.idx lists {num_bytes} bytes, {prefix}.bin has {size}: make both anew")
    for split, borders, wanted in zip(SPLITS, config.split_matrix, num_samples, strict=True):
        first, stop = (round(share * len(lengths)) for share in borders or (0, 0))
        if wanted and not lengths[first:stop].any():
            raise ValueError(
                f"{prefix}: none of its {len(lengths)} documents is for {split} (--split {config.split}): give that "
                "split a larger share, or more and shorter documents"
            )
    last, end = int(indexed[0][-1]), config.tokenizer.eod
    if (config.reset_position_ids or config.eod_mask_loss) and last != end:
        raise ValueError(
            f"{prefix}: the first document ends with token {last}, the tokenizer's end of a document is {end}: "
            "--reset-position-ids and --eod-mask-loss need it. Give the --tokenizer of the files, or files with ends "
            "of documents (examples/index_text.py; --append-eod of Megatron-LM)"
        )


def _cache_folder(cache_path: str | None, prefixes: Sequence[str]) -> Path:
    """Return a folder for these very files: megatron-core names caches by path, whatever is in the files."""
    digest = hashlib.blake2b(digest_size=8)
    for prefix in prefixes:
        digest.update(Path(f"{prefix}.idx").read_bytes())
    return Path(cache_path or f"{prefixes[0]}-cache") / digest.hexdigest()


def micro_batches(
    dataset: Any,
    micro_batch_size: int,
    *,
    first_sample: int = 0,
    count: int | None = None,
    replica_id: int = 0,
    num_replicas: int = 1,
    num_workers: int = 0,
) -> Iterator[MicroBatch]:
    """Return the micro-batches of one data-parallel replica from a sample on: `count` of them, or all that there are.

    Each round takes `micro_batch_size` samples for replica 0, the next ones for replica 1, and so on.

    Raises:
        ValueError: the dataset has fewer samples, or (from `next()`) a token that the tokenizer does not have.
    """
    round_size = micro_batch_size * num_replicas
    available = max(0, len(dataset) - first_sample) // round_size
    if (count or 1) > available:
        raise ValueError(
            f"{count or 1} micro-batches of {num_replicas} replicas from sample {first_sample} on: the data has "
            f"{len(dataset)} samples. Give --data-path more text, or train for fewer --train-iters"
        )
    starts = range(first_sample + replica_id * micro_batch_size, len(dataset), round_size)[: count or available]
    loader = DataLoader(
        dataset,
        batch_sampler=(range(start, start + micro_batch_size) for start in starts),
        collate_fn=partial(_collate, dataset.config.tokenizer.vocab_size),
        num_workers=num_workers,
        generator=torch.Generator(),  # torch's own would be drawn from on the ranks that load data only
    )
    return iter(loader)


def _collate(vocab_size: int, samples: Sequence[Mapping[str, Tensor]]) -> MicroBatch:
    tokens, position_ids, labels, loss_mask = (
        torch.stack([sample[key] for sample in samples]) for key in ("tokens", "position_ids", "labels", "loss_mask")
    )
    largest = int(torch.maximum(tokens.max(), labels.max()))
    if largest >= vocab_size:  # a vocabulary that is split over ranks would embed it as zeros
        raise ValueError(
            f"the data has token {largest}, the vocabulary is {vocab_size}: give the --tokenizer of the files"
        )
    return (tokens, position_ids), (labels, loss_mask)
