"""megatron-core's ``GPTDataset`` over ``.bin`` and ``.idx`` files, built on all ranks.

Sample n of a split is one fixed window of L + 1 tokens: the documents of the split in a random order, over all epochs,
cut every L tokens, and these windows in a random order. Rank 0 works that out once and writes it to a cache that the
other ranks read, with a barrier of all ranks between.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch.distributed as dist

from terapipe_ds.models.megatron_data.index_file import check_index
from terapipe_ds.models.megatron_data.needs import MegatronDataError, quiet_imports, require_helpers
from terapipe_ds.models.megatron_data.options import DataOptions
from terapipe_ds.models.megatron_data.tokenizers import Tokenizer

SPLITS = ("train", "valid", "test")


class Datasets(NamedTuple):
    """A ``GPTDataset`` or ``BlendedDataset`` per split; None where none was asked for, or not on this rank."""

    train: Any
    valid: Any
    test: Any


def build_datasets(
    options: DataOptions,
    tokenizer: Tokenizer,
    num_samples: Sequence[int | None],
    *,
    on_this_rank: bool = True,
) -> Datasets:
    """The datasets of a run. A collective over all ranks: each must call it, with equal arguments.

    The order of samples depends on ``num_samples`` where that takes more than one epoch: a run that is resumed gives
    the numbers that it was started with, as with Megatron-LM.

    Args:
        tokenizer: that of the files, see :func:`~terapipe_ds.models.megatron_data.tokenizers.build_tokenizer`.
        num_samples: for training, validation and test, over all replicas and steps; 0: none; None: one epoch.
        on_this_rank: False on ranks that draw no data (neither first nor last stage); never on rank 0, which writes the
            cache. The tensor-parallel ranks of a stage each draw their own, the same.

    Raises:
        MegatronDataError: megatron-core or a file is missing, a split has no documents, too few samples, another
            tokenizer than that of the files, or a cache that this rank does not see.
    """
    require_helpers()
    _check_call(options, num_samples, on_this_rank)
    lengths = _check_files(options, tokenizer, num_samples)
    config = _config(options, tokenizer, num_samples, lengths)
    with quiet_imports():
        from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
        from megatron.core.datasets.gpt_dataset import GPTDataset
    try:
        builder = BlendedMegatronDatasetBuilder(GPTDataset, list(num_samples), lambda: on_this_rank, config)
        built = Datasets(*builder.build())
    except Exception as error:
        explained = _explained(error, config.path_to_cache)
        if explained is None:
            raise
        raise explained from error
    _check_sizes(built, num_samples)
    return built


def _check_call(options: DataOptions, num_samples: Sequence[int | None], on_this_rank: bool) -> None:
    if len(num_samples) != 3 or any(n is not None and (type(n) is not int or n < 0) for n in num_samples):
        raise MegatronDataError(
            f"num_samples = {num_samples!r}: give three numbers >= 0 (training, validation, test), or None for an epoch"
        )
    prefixes, weights = options.blend()
    if dist.is_initialized():
        if dist.get_rank() == 0 and not on_this_rank:
            raise MegatronDataError("on_this_rank is False on rank 0, which writes the order of samples: give True")
    elif len(prefixes) > 1 or weights:
        raise MegatronDataError(
            "megatron-core blends data only where torch.distributed runs: call deepspeed.init_distributed() first, or "
            "give one prefix without a weight"
        )
    if weights and None in num_samples:
        raise MegatronDataError("num_samples has None, but an epoch of a weighted blend has no length: give a number")


def _check_files(
    options: DataOptions, tokenizer: Tokenizer, num_samples: Sequence[int | None]
) -> list[numpy.ndarray]:
    """The lengths of all documents of each prefix, once every wanted split is known to have enough of them."""
    with quiet_imports():
        from megatron.core.datasets.indexed_dataset import IndexedDataset

    found = []
    for prefix in options.blend()[0]:
        for suffix in (".bin", ".idx"):
            if not Path(prefix + suffix).is_file():
                raise MegatronDataError(
                    f"{prefix}{suffix} does not exist: give the path without .bin and .idx, or make both from text "
                    "with terapipe index"
                )
        check_index(prefix)
        try:
            indexed = IndexedDataset(prefix)
        except (AssertionError, ValueError) as error:  # an empty .bin cannot be mapped
            raise MegatronDataError(f"{prefix}.idx is no index of {prefix}.bin ({error}): make them anew") from error
        found.append(numpy.array(indexed.sequence_lengths))
        _check_splits(prefix, found[-1], options, num_samples)
        last = int(indexed[0][-1]) if found[-1][0] else "none"
        if (options.reset_position_ids or options.eod_mask_loss) and last != tokenizer.eod:
            raise MegatronDataError(
                f"{prefix}: the first document ends with token {last}, the tokenizer's end of a document is "
                f"{tokenizer.eod}: reset_position_ids and eod_mask_loss need it. Give the tokenizer of the files, or "
                "files with ends of documents (terapipe index; --append-eod of Megatron-LM)"
            )
    return found


def _check_splits(
    prefix: str, lengths: numpy.ndarray, options: DataOptions, num_samples: Sequence[int | None]
) -> None:
    """megatron-core would count epochs of an empty split for ever."""
    stop = 0.0
    for name, share, wanted in zip(SPLITS, options.shares(), num_samples, strict=True):
        start, stop = stop, stop + share
        if wanted == 0:
            continue
        documents = lengths[round(start * len(lengths)) : round(stop * len(lengths))]
        tokens = int(documents.sum(dtype=numpy.int64))
        if tokens == 0:
            raise MegatronDataError(
                f"{prefix}: none of its {len(lengths)} documents is for {name} (split {options.split}): give that "
                "split a larger share, more and shorter documents, or ask for 0 samples of it"
            )
        if wanted is None and tokens <= options.sequence_length:
            raise MegatronDataError(
                f"{prefix}: an epoch of {name} has {tokens} tokens, too few for a sample of {options.sequence_length} "
                "and the label of its last: give more text, a larger share in the split or a shorter sequence"
            )


def _config(
    options: DataOptions, tokenizer: Tokenizer, num_samples: Sequence[int | None], lengths: Sequence[numpy.ndarray]
) -> Any:
    with quiet_imports():
        from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

    blend = options.blend()
    config = GPTDatasetConfig(
        random_seed=options.seed,
        sequence_length=options.sequence_length,
        blend=blend,
        split=options.split,
        path_to_cache=str(_cache_folder(options, lengths)),
        tokenizer=tokenizer,
        reset_position_ids=options.reset_position_ids,
        reset_attention_mask=False,
        eod_mask_loss=options.eod_mask_loss,
        create_attention_mask=False,  # sliced attention is causal by itself
        drop_last_partial_validation_sequence=options.drop_last_partial_validation_sequence,
    )
    for index, wanted in enumerate(num_samples):
        if wanted == 0:
            config.split_matrix[index] = None  # or an empty split would be counted through for ever
    return config


def _cache_folder(options: DataOptions, lengths: Sequence[numpy.ndarray]) -> Path:
    """A folder of its own for every set of document lengths.

    megatron-core names its caches by path and options alone, so that files that were made anew under an old name would
    be read by the order of the old ones; and it leaves ``drop_last_partial_validation_sequence`` out of the name.
    """
    digest = hashlib.blake2b(digest_size=8)
    for documents in lengths:
        digest.update(len(documents).to_bytes(8, "little"))
        digest.update(documents.tobytes())
    whole = "" if options.drop_last_partial_validation_sequence else "-partial"
    return Path(options.cache_path or f"{options.blend()[0][0]}-cache") / (digest.hexdigest() + whole)


def _explained(error: Exception, cache: str) -> MegatronDataError | None:
    """megatron-core wraps what failed on rank 0, and lets pass what failed on the others."""
    if isinstance(error, FileNotFoundError):
        return MegatronDataError(
            f"the order of samples that rank 0 wrote is not to be seen here ({error.filename}): give a cache path on a "
            "file system that all nodes share"
        )
    reason = error if isinstance(error, OSError) else error.__cause__
    if isinstance(reason, OSError):
        return MegatronDataError(
            f"the order of samples cannot be written to {cache} ({reason.strerror}): give a cache path that can"
        )
    return None


def _check_sizes(built: Datasets, num_samples: Sequence[int | None]) -> None:
    for name, dataset, wanted in zip(SPLITS, built, num_samples, strict=True):
        if dataset is not None and wanted is not None and len(dataset) < wanted:
            raise MegatronDataError(
                f"{name} has {len(dataset)} samples, {wanted} were asked for: prefixes without weights give one epoch. "
                "Give weights, as in 0.7 books 0.3 code"
            )
