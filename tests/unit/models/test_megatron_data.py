"""Datasets of megatron-core and the micro-batches drawn from them.

Every token of the corpus is another number, so that a sample says itself where it comes from.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from terapipe_ds import compat
from terapipe_ds.models.megatron_data.datasets import build_datasets
from terapipe_ds.models.megatron_data.micro_batches import MicroBatch, evaluation_batches, training_batches
from terapipe_ds.models.megatron_data.needs import MegatronDataError
from terapipe_ds.models.megatron_data.options import DataOptions
from terapipe_ds.models.megatron_data.text_index import find_files, write_index
from terapipe_ds.models.megatron_data.tokenizers import build_tokenizer
from terapipe_ds.plan import SlicePlan
from terapipe_ds.runtime.batch import SliceableTensors
from terapipe_ds.runtime.loss import slice_weights

pytestmark = pytest.mark.skipif(not compat.has_megatron(), reason="needs megatron-core: terapipe_ds[megatron]")

EOD = 4000
TOKENIZER = f"null:{EOD}"
LENGTH = 16
SIZES = [3 + 7 * (i % 11) for i in range(40)]  # tokens of the documents, without the end: 3 to 73


def texts() -> list[list[int]]:
    numbers = iter(range(EOD))
    return [list(itertools.islice(numbers, size)) for size in SIZES]


def write(folder: Path, name: str, documents: list[list[int]]) -> str:
    source = folder / f"{name}.jsonl"
    source.write_text("\n".join(f'{{"text": "{" ".join(map(str, document))}"}}' for document in documents))
    write_index(folder / name, find_files([source]), build_tokenizer(TOKENIZER), force=True)
    return str(folder / name)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("indexed"), "numbers", texts())


def options(prefix: str, **changes: Any) -> DataOptions:
    return DataOptions(**{"data_path": prefix, "sequence_length": LENGTH, "split": "8,1,1"} | changes)


def built(prefix: str, num_samples: Any = (None, None, None), **changes: Any) -> Any:
    return build_datasets(options(prefix, **changes), build_tokenizer(TOKENIZER), num_samples)


def rows(batches: Iterator[MicroBatch] | list[MicroBatch]) -> list[tuple[int, ...]]:
    return [tuple(row.tolist()) for (tokens, _), _ in batches for row in tokens]


def numbers_of(sample: dict[str, Tensor]) -> list[int]:
    """Without ends of documents; with the last label, which no token has."""
    return [t for t in [*sample["tokens"].tolist(), int(sample["labels"][-1])] if t != EOD]


class TestDatasets:
    def test_samples_tile_the_documents(self, prefix: str) -> None:
        following = {a: b for text in texts() for a, b in itertools.pairwise([*text, EOD])}
        firsts = {text[0] for text in texts()}
        seen: list[int] = []
        for sample in (dataset := built(prefix).train):
            tokens, labels = sample["tokens"].tolist(), sample["labels"].tolist()
            assert len(tokens) == len(labels) == LENGTH
            assert tokens[1:] == labels[:-1]
            for token, label in zip(tokens, labels, strict=True):
                assert label in firsts if token == EOD else label == following[token]
            seen += tokens
        total = sum(SIZES[:32]) + 32  # 8 of 10 documents, with their ends
        assert len(dataset) == (total - 1) // LENGTH
        seen = [token for token in seen if token != EOD]
        assert len(set(seen)) == len(seen), "no token twice in an epoch"
        assert set(seen) <= set(range(sum(SIZES[:32])))
        assert total - len(seen) - LENGTH < 32 + LENGTH, "and but for the end of the last document all of them"
        assert seen != sorted(seen), "in another order"

    def test_splits_share_no_document(self, prefix: str) -> None:
        bounds = [0, sum(SIZES[:32]), sum(SIZES[:36]), sum(SIZES)]
        for dataset, start, stop in zip(built(prefix), bounds[:-1], bounds[1:], strict=True):
            found = {number for sample in dataset for number in numbers_of(sample)}
            assert found
            assert start <= min(found) <= max(found) < stop

    def test_more_samples_than_an_epoch_has(self, prefix: str) -> None:
        one, three = built(prefix).train, built(prefix, (3 * len(built(prefix).train), 0, 0)).train
        assert len(three) >= 3 * len(one)
        counts = [0] * sum(SIZES[:32])
        for sample in three:
            for token in sample["tokens"].tolist():
                if token != EOD:
                    counts[token] += 1
        assert max(counts) <= 4
        assert sum(count >= 3 for count in counts) > 0.9 * len(counts)

    def test_what_is_not_asked_for_is_not_built(self, prefix: str) -> None:
        train, valid, test = built(prefix, (5, 0, 0), split="1")
        assert len(train) >= 5
        assert (valid, test) == (None, None)

    def test_the_seed_decides_the_order(self, prefix: str) -> None:
        first, again, other = (
            rows(itertools.islice(training_batches(built(prefix, seed=seed).train, 4), 3)) for seed in (1, 1, 2)
        )
        assert first == again
        assert first != other

    @pytest.mark.parametrize("reset_position_ids", [False, True])
    @pytest.mark.parametrize("eod_mask_loss", [False, True])
    def test_positions_and_masks_end_with_documents(
        self, prefix: str, reset_position_ids: bool, eod_mask_loss: bool
    ) -> None:
        train = built(prefix, reset_position_ids=reset_position_ids, eod_mask_loss=eod_mask_loss).train
        ends = 0
        for (tokens, positions), (_, mask) in itertools.islice(training_batches(train, 1), 20):
            expected, position = [], 0
            for token in tokens[0].tolist():
                expected.append(position)
                position = 0 if reset_position_ids and token == EOD else position + 1
            ends += int((tokens == EOD).sum())
            assert positions[0].tolist() == expected
            assert torch.equal(mask[0] == 0, (tokens[0] == EOD) & eod_mask_loss)
        assert ends > 3

    def test_padding_is_masked(self, prefix: str) -> None:
        valid = built(prefix, drop_last_partial_validation_sequence=False).valid
        total = sum(SIZES[32:36]) + 4
        padding = -(total - 1) % LENGTH
        assert padding
        assert len(built(prefix).valid) == (total - 1) // LENGTH == len(valid) - 1, "both caches are kept apart"
        masks = torch.stack([sample["loss_mask"] for sample in valid])
        assert sorted((masks == 0).sum(dim=1).tolist()) == [0] * (len(valid) - 1) + [padding]
        padded = next(s for s in valid if s["loss_mask"].min() == 0)
        assert padded["labels"][-padding:].tolist() == [0] * padding

    def test_files_made_anew_are_read_anew(self, tmp_path: Path) -> None:
        prefix = write(tmp_path, "x", texts())
        assert len(built(prefix).train) > 60
        prefix = write(tmp_path, "x", [list(range(3000, 3040))] * 10)
        train = built(prefix).train
        assert len(train) == (8 * 41 - 1) // LENGTH
        assert min(min(numbers_of(sample)) for sample in train) >= 3000

    def test_the_cache_goes_where_it_is_told(self, prefix: str, tmp_path: Path) -> None:
        built(prefix, (3, 0, 0), cache_path=str(tmp_path / "cache"))
        assert list((tmp_path / "cache").rglob("*train-shuffle_index.npy"))

    def test_nothing_is_compiled(self, prefix: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        def no_process(*arguments: Any, **_: Any) -> None:
            raise AssertionError(f"starts {arguments}")

        monkeypatch.setattr(subprocess, "Popen", no_process)
        assert len(built(prefix, (7, 0, 0), cache_path=str(tmp_path)).train) >= 7


class TestRefusals:
    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"reset_attention_mask": True}, "not there yet under token slices .* reset_position_ids"),
            ({"sequence_length": 0}, "sequence_length = 0"),
            ({"sequence_length": True}, "sequence_length = True"),
            ({"seed": -1}, "seed = -1"),
            ({"split": "9,x"}, "split = '9,x'"),
            ({"split": "1e2,1"}, "split = '1e2,1'"),
            ({"split": "0,0"}, "split = '0,0'"),
            ({"split": "1,1,1,1"}, "split = '1,1,1,1'"),
            ({"data_path": " "}, "data_path is empty"),
            ({"data_path": "0 a 1 b"}, "the weight 0.0"),
            ({"data_path": ["nan", "a"]}, "the weight nan"),
        ],
    )
    def test_options(self, changes: dict[str, Any], reason: str) -> None:
        with pytest.raises(MegatronDataError, match=reason):
            options("a", **changes)

    @pytest.mark.parametrize(
        ("data_path", "blend"),
        [
            ("a", (["a"], None)),
            ("a b", (["a", "b"], None)),
            ("0.7 a .3 b", (["a", "b"], [0.7, 0.3])),
            (["3", "with blank/a"], (["with blank/a"], [3.0])),
            ("1 a b 2", (["1", "a", "b", "2"], None)),
        ],
    )
    def test_blends_are_read_as_megatron_reads_them(self, data_path: Any, blend: Any) -> None:
        assert options("", data_path=data_path).blend() == blend

    @pytest.mark.parametrize(
        ("num_samples", "changes", "reason"),
        [
            ((1, 2), {}, "give three numbers"),
            ((1, -1, 0), {}, "give three numbers"),
            ((5, 5, 0), {"split": "1"}, "none of its 40 documents is for valid"),
            ((5, 0, 5), {"split": "998,1,1"}, "none of its 40 documents is for test"),
            ((None, 0, 0), {"sequence_length": 10000}, "too few for a sample of 10000"),
            ((5, 0, 0), {"data_path": "no/such"}, "no/such.bin does not exist: give the path without"),
        ],
    )
    def test_calls(self, prefix: str, num_samples: Any, changes: dict[str, Any], reason: str) -> None:
        with pytest.raises(MegatronDataError, match=reason):
            built(prefix, num_samples, **changes)

    def test_a_blend_without_ranks(self, prefix: str) -> None:
        with pytest.raises(MegatronDataError, match="init_distributed"):
            built(prefix, (5, 0, 0), data_path=["0.5", prefix, "0.5", prefix])

    def test_the_tokenizer_of_other_files(self, prefix: str) -> None:
        other = build_tokenizer("bytes")
        with pytest.raises(MegatronDataError, match=f"ends with token {EOD}, the tokenizer's end of a document is 256"):
            build_datasets(options(prefix, eod_mask_loss=True), other, (5, 0, 0))
        train = build_datasets(options(prefix), other, (5, 0, 0)).train
        with pytest.raises(MegatronDataError, match="the tokenizer's vocabulary is 257"):
            list(training_batches(train, 1))

    def test_a_cache_that_cannot_be_written(self, prefix: str, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("in the way")
        with pytest.raises(MegatronDataError, match="cannot be written to .*file.* give a cache path"):
            built(prefix, (5, 0, 0), cache_path=str(tmp_path / "file" / "cache"))

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of a half-built IndexedDataset
    def test_files_that_are_no_index(self, tmp_path: Path) -> None:
        for suffix in ("bin", "idx"):
            (tmp_path / f"x.{suffix}").write_text("something else, and long enough for a header")
        with pytest.raises(MegatronDataError, match=r"x.idx is no index of .*x.bin"):
            built(str(tmp_path / "x"))

    def test_without_megatron(self, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(compat, "has_megatron", lambda: False)
        with pytest.raises(MegatronDataError, match=r"pip install 'terapipe_ds\[megatron\]'"):
            built(prefix)

    def test_without_the_compiled_helpers(self, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "megatron.core.datasets.helpers_cpp", None)
        with pytest.raises(MegatronDataError, match="compiled data helpers cannot be imported"):
            built(prefix)


class TestMicroBatches:
    def test_form(self, prefix: str) -> None:
        for batches in (training_batches(built(prefix).train, 3), evaluation_batches(built(prefix).valid, 3, 1)):
            (tokens, positions), (labels, mask) = next(batches)
            assert {t.shape for t in (tokens, positions, labels, mask)} == {(3, LENGTH)}
            assert [t.dtype for t in (tokens, positions, labels, mask)] == [torch.int64] * 3 + [torch.float32]

    @pytest.mark.parametrize(("num_replicas", "size"), [(1, 1), (1, 4), (2, 2), (3, 1)])
    def test_replicas_share_out_the_dataset_in_its_order(self, prefix: str, num_replicas: int, size: int) -> None:
        train = built(prefix).train
        whole = [tuple(train[i]["tokens"].tolist()) for i in range(24)]
        drawn = [
            rows(itertools.islice(training_batches(train, size, replica_id=r, num_replicas=num_replicas), 3))
            for r in range(num_replicas)
        ]
        for round_id, replica, row in itertools.product(range(3), range(num_replicas), range(size)):
            sample = (round_id * num_replicas + replica) * size + row  # Megatron's sequential sampler
            assert drawn[replica][round_id * size + row] == whole[sample]

    def test_a_run_goes_on_where_it_stopped_with_other_replicas(self, prefix: str) -> None:
        train = built(prefix).train
        start = rows(itertools.islice(training_batches(train, 2), 9))
        resumed = training_batches(built(prefix).train, 1, consumed_samples=6, replica_id=1, num_replicas=3)
        assert rows(itertools.islice(resumed, 4)) == start[7::3]

    def test_the_end_of_the_data(self, prefix: str) -> None:
        train = built(prefix).train
        batches = training_batches(train, 2, num_replicas=2, consumed_samples=len(train) - 9)
        assert [len(next(batches)[0][0]) for _ in range(2)] == [2, 2]
        with pytest.raises(MegatronDataError, match=f"{len(train) - 1} of {len(train)} samples are consumed"):
            next(batches)
        with pytest.raises(MegatronDataError, match="used up"):
            next(training_batches(train, 2, consumed_samples=10**6))

    def test_workers_read_the_same(self, prefix: str) -> None:
        valid = built(prefix).valid
        assert rows(evaluation_batches(valid, 1, 4, num_workers=1)) == rows(evaluation_batches(valid, 1, 4))

    def test_drawing_leaves_torchs_random_numbers_alone(self, prefix: str) -> None:
        train = built(prefix).train
        before = torch.random.get_rng_state()
        next(training_batches(train, 2))
        assert torch.equal(torch.random.get_rng_state(), before)

    def test_evaluations_see_the_same_samples(self, prefix: str) -> None:
        valid = built(prefix).valid
        once, again = (rows(evaluation_batches(valid, 2, 2)) for _ in range(2))
        assert once == again == [tuple(valid[i]["tokens"].tolist()) for i in range(4)]
        halves = [rows(evaluation_batches(valid, 1, 2, replica_id=r, num_replicas=2)) for r in range(2)]
        assert halves == [once[0::2], once[1::2]]

    @pytest.mark.parametrize(
        ("numbers", "reason"),
        [
            ({"micro_batch_size": 0}, "micro_batch_size = 0"),
            ({"consumed_samples": -1}, "consumed_samples = -1"),
            ({"replica_id": 2, "num_replicas": 2}, "replica 2 of 2"),
        ],
    )
    def test_numbers_are_checked_before_the_first_draw(self, prefix: str, numbers: Any, reason: str) -> None:
        with pytest.raises(MegatronDataError, match=reason):
            training_batches(built(prefix).train, **{"micro_batch_size": 1} | numbers)

    def test_an_evaluation_larger_than_the_data(self, prefix: str) -> None:
        valid = built(prefix).valid
        with pytest.raises(MegatronDataError, match=f"takes 4000 samples of {len(valid)}"):
            evaluation_batches(valid, 4, 500, num_replicas=2)

    def test_masked_slices_add_up_to_the_loss_of_megatron(self, prefix: str) -> None:
        """sum(losses * mask) / sum(mask) of a micro-batch, from slices weighed by the sum of their mask."""
        train = built(prefix, eod_mask_loss=True).train
        (tokens, _), labels = next(b for b in training_batches(train, 2) if b[1][1].min() == 0)
        losses = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        plan = SlicePlan((5, 1, 7, 3))
        weights = slice_weights(
            SliceableTensors.of_labels(labels, 1), plan, loss_reduction="mean", ignore_index=-100,
            slice_weight=lambda part: float(part[1].sum()),
        )  # fmt: skip

        def mean(start: int, stop: int) -> float:
            mask = labels[1][:, start:stop]
            return float((losses[:, start:stop] * mask).sum() / mask.sum())

        assert sum(w * mean(*plan.span(i)) for i, w in enumerate(weights)) == pytest.approx(mean(0, LENGTH), rel=1e-12)
        assert weights != tuple(n / LENGTH for n in plan.lengths), "the mask makes a difference here"


def test_splits_are_cut_as_megatron_cuts_them() -> None:
    """The check of empty splits must look at the very documents that the builder takes."""
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    for split in ("949,50,1", "8,1,1", "1", "0.5, .25, .25", "99,1"):
        stop, shares = 0.0, []
        for share in options("a", split=split).shares():
            shares.append((stop, stop + share))
            stop += share
        matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
        assert [ends if ends[0] < ends[1] else None for ends in shares] == matrix
