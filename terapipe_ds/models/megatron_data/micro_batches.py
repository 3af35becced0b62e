"""Samples of a ``GPTDataset`` as micro-batches for DeepSpeed's pipeline engine.

Which samples a micro-batch has follows from how many samples the run has consumed and from the replica alone, as in
Megatron's sequential sampler (``MegatronPretrainingSampler``): from the first unused sample on, each round of
micro-batches takes B samples for replica 0, the next B for replica 1 and so on. The random order is the dataset's.
Nothing is sent between ranks: tensor-parallel ranks and the first and last stage of a replica draw the same, replicas
never share a sample, and a resumed run goes on where the first one stopped, also with other numbers of replicas and of
samples in a micro-batch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from terapipe_ds.models.megatron_data.needs import MegatronDataError

MicroBatch = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]
"""((tokens, position_ids), (labels, loss_mask)): all [B, L]; int64, loss_mask float32 with 0 or 1."""


def training_batches(
    dataset: Any,
    micro_batch_size: int,
    *,
    consumed_samples: int = 0,
    replica_id: int = 0,
    num_replicas: int = 1,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> Iterator[MicroBatch]:
    """Micro-batches of one data-parallel replica, from a sample on.

    Args:
        dataset: of :func:`~terapipe_ds.models.megatron_data.datasets.build_datasets`.
        consumed_samples: what all replicas together have used: ``engine.global_samples``, which a checkpoint restores.
        num_workers: processes that read ahead; 0 reads in this one.

    Raises:
        MegatronDataError: at once for an impossible number; from ``next()`` when the dataset is used up, or has a token
            that its tokenizer does not have.
    """
    _check_numbers(micro_batch_size, consumed_samples, replica_id, num_replicas)
    round_size = micro_batch_size * num_replicas
    num_rounds = max(0, len(dataset) - consumed_samples) // round_size
    numbers = _sample_numbers(consumed_samples, num_rounds, micro_batch_size, replica_id, num_replicas)
    consumed = consumed_samples + num_rounds * round_size
    used_up = MegatronDataError(
        f"the data is used up: {consumed} of {len(dataset)} samples are consumed, and a micro-batch of all replicas "
        f"takes {round_size}. Ask build_datasets() for as many samples as the run takes"
    )
    return _then_raise(_loader(dataset, numbers, num_workers, pin_memory), used_up)


def evaluation_batches(
    dataset: Any,
    micro_batch_size: int,
    num_micro_batches: int,
    *,
    replica_id: int = 0,
    num_replicas: int = 1,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> Iterator[MicroBatch]:
    """The first samples of a dataset, shared out to the replicas: ``num_micro_batches`` for each.

    The same ones every time, so that losses can be compared; Megatron-LM goes on through the dataset from one
    evaluation to the next.

    Raises:
        MegatronDataError: an impossible number, or the dataset has fewer samples.
    """
    _check_numbers(micro_batch_size, 0, replica_id, num_replicas)
    needed = micro_batch_size * num_replicas * num_micro_batches
    if num_micro_batches < 1 or needed > len(dataset):
        raise MegatronDataError(
            f"an evaluation of {num_micro_batches} micro-batches takes {needed} samples of {len(dataset)}: ask "
            "build_datasets() for more, or evaluate on fewer"
        )
    numbers = _sample_numbers(0, num_micro_batches, micro_batch_size, replica_id, num_replicas)
    return iter(_loader(dataset, numbers, num_workers, pin_memory))


def _check_numbers(micro_batch_size: int, consumed_samples: int, replica_id: int, num_replicas: int) -> None:
    if micro_batch_size < 1:
        raise MegatronDataError(f"micro_batch_size = {micro_batch_size}: give a number >= 1")
    if consumed_samples < 0:
        raise MegatronDataError(f"consumed_samples = {consumed_samples}: give a number >= 0")
    if not 0 <= replica_id < num_replicas:
        raise MegatronDataError(
            f"replica {replica_id} of {num_replicas}: give the data-parallel rank, from 0 to {num_replicas - 1}"
        )


def _sample_numbers(
    first_sample: int, num_rounds: int, micro_batch_size: int, replica_id: int, num_replicas: int
) -> Iterator[range]:
    for round_id in range(num_rounds):
        start = first_sample + (round_id * num_replicas + replica_id) * micro_batch_size
        yield range(start, start + micro_batch_size)


def _loader(dataset: Any, numbers: Iterator[range], num_workers: int, pin_memory: bool) -> Iterable[MicroBatch]:
    return DataLoader(
        dataset,
        batch_sampler=cast(Any, numbers),
        collate_fn=functools.partial(_collate, dataset.config.tokenizer.vocab_size),
        num_workers=num_workers,
        pin_memory=pin_memory,
        generator=torch.Generator(),  # or it would draw from torch's own, on the ranks that load data only
    )


def _then_raise(batches: Iterable[MicroBatch], error: Exception) -> Iterator[MicroBatch]:
    yield from batches
    raise error


def _collate(vocab_size: int, samples: Sequence[Mapping[str, Tensor]]) -> MicroBatch:
    tokens, position_ids, labels, loss_mask = (
        torch.stack([sample[key] for sample in samples]) for key in ("tokens", "position_ids", "labels", "loss_mask")
    )
    largest = int(torch.maximum(tokens.max(), labels.max()))
    if largest >= vocab_size:  # a vocabulary split over ranks would take it for zeros, and train on
        raise MegatronDataError(
            f"the data has token {largest}, the tokenizer's vocabulary is {vocab_size}: give the tokenizer that made "
            "the files"
        )
    return (tokens, position_ids), (labels, loss_mask)
