"""Test datasets of megatron-core on several ranks: which rank builds, what each sees, how the engine uses batches."""

import functools
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.distributed.engines import raised_by
from tests.distributed.harness import rank_pool

pytest.importorskip("megatron.core", reason="needs the extra megatron")
sys.path.append(str(Path(__file__).parents[2] / "examples"))

from index_text import write_index
from megatron_data import build_datasets, build_tokenizer, micro_batches

LENGTH = 16
EOD = 30
TOKENIZER = f"null:{EOD}"


@pytest.fixture
def prefixes(tmp_path: Path) -> tuple[str, str]:
    """Two files of many short documents; the second has only tokens from 20 on."""
    for name, first in (("a", 0), ("b", 20)):
        lines = []
        for i in range(40):
            words = " ".join(str(first + (i * j + j) % (20 - first // 2)) for j in range(3 + i % 9))
            lines.append(f'{{"text": "{words}"}}')
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
        write_index(tmp_path / name, [tmp_path / f"{name}.jsonl"], build_tokenizer(TOKENIZER))
    return str(tmp_path / "a"), str(tmp_path / "b")


def datasets(data_path: str, num_samples: Any, reads: bool = True) -> list[Any]:
    args = SimpleNamespace(
        seq_length=LENGTH, split="8,1,1", seed=1, eod_mask_loss=True, reset_position_ids=True, data_cache_path=None
    )
    return build_datasets(args, data_path.split(), build_tokenizer(TOKENIZER), num_samples, reads)


def samples_on_each_rank(data_path: str, absent: int | None = None) -> tuple[int, Any]:
    """The number of samples, and all training samples as lists; None on the rank `absent`."""
    rank = torch.distributed.get_rank()
    training, validation, test = datasets(data_path, (30, 2, 0), reads=rank != absent)
    assert test is None
    if rank == absent:
        assert (training, validation) == (None, None)
        return 0, None
    assert len(validation) >= 2
    batches = micro_batches(training, 1, count=30)
    return len(training), [[t.tolist() for pair in batch for t in pair] for batch in batches]


class TestBuilding:
    def test_all_ranks_get_the_same_samples(self, prefixes: tuple[str, str]) -> None:
        path = prefixes[0]
        first, second = rank_pool(2).run(samples_on_each_rank, data_path=path)
        assert first[0] >= 30
        assert len({str(sample) for sample in first[1]}) > 20
        assert second == first
        assert rank_pool(2).run(samples_on_each_rank, data_path=path) == [first, first], "from the cache as well"

    def test_a_middle_stage_takes_part_and_draws_nothing(self, prefixes: tuple[str, str]) -> None:
        for data_path in (prefixes[0], f"3 {prefixes[0]} 1 {prefixes[1]}"):
            first, second = rank_pool(2).run(samples_on_each_rank, data_path=data_path, absent=1)
            assert len(first[1]) == 30
            assert second == (0, None)

    def test_blends_are_mixed_by_weight(self, prefixes: tuple[str, str]) -> None:
        data_path = f"0.75 {prefixes[0]} 0.25 {prefixes[1]}"
        (_, first), (_, second) = rank_pool(2).run(samples_on_each_rank, data_path=data_path)
        assert first == second
        from_b = sum(min(t for t in tokens[0]) >= 20 for tokens, *_ in first)
        assert from_b in (7, 8)  # a quarter of 30

    def test_prefixes_without_weights_give_one_epoch(self, prefixes: tuple[str, str]) -> None:
        act = functools.partial(datasets, " ".join(prefixes), (3000, 0, 0))
        for kind, said in rank_pool(2).run(raised_by, act=act):
            assert kind == "ValueError"
            assert "training has " in said and "3000 were asked for: prefixes without weights give one epoch" in said
