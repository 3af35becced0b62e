"""Test that ranks that divide each slice's tokens train as one process on whole sequences, in fp64 on four ranks."""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import ProcessTopology
from torch import Tensor, nn
from torch.utils.data import Dataset

import terapipe_ds
from tests.distributed import cases, engines
from tests.distributed.cases import Case, RankRecord
from tests.distributed.engines import engine_of, of_rank_0, torch_attention
from tests.distributed.harness import rank_pool
from tests.distributed.training import (
    Whole,
    layers,
    micro_batches,
    options,
    terapipe_section,
    to_numpy,
    train_alone,
    train_by,
)

RANKS = 4
BASE = Case(slices=(6, 2, 4), masked=True)
PACKED = replace(BASE, documents=True, kv_heads=2)


def topology(stages: int, replicas: int = 1, axis: str = "sequence") -> ProcessTopology:
    return ProcessTopology(axes=["pipe", "data", axis], dims=[stages, replicas, RANKS // stages // replicas])


@contextlib.contextmanager
def engine_on(case: Case, changes: dict[str, Any], axis: str = "sequence", **more: Any) -> Iterator[Any]:
    found = {**options(case), **more}
    found["module"] = {**found.get("module", {}), "topology": topology(case.stages, case.data_parallel, axis)}
    terapipe_ds.register()  # for the constructor of a module with tied layers
    try:
        with engine_of(layers(case), {**terapipe_section(case), **changes}, **found) as engine:
            yield engine
    finally:
        terapipe_ds.unregister()


def train_on_sequence_ranks(case: Case, **changes: Any) -> RankRecord:
    with engine_on(case, changes) as engine:
        return train_by(engine, case)


def logits_on_sequence_ranks(case: Case) -> Any:
    with engine_on(case, {}) as engine:
        data = iter(micro_batches(case, 0, 1))
        return engine.eval_batch(data, return_logits=True, bcast_loss=False)[1]


def save_and_resume(case: Case, folder: str) -> RankRecord:
    """Train one step, save it, and train both steps again from there; return the record of the second step."""
    with engine_on(case, {}) as engine:
        engine.train_batch(iter(micro_batches(case, 0, 1)))
        engine.save_checkpoint(folder, tag="step1")
    with engine_on(case, {}) as engine:
        return _from_checkpoint(engine, case, folder)


def resume(case: Case, folder: str) -> RankRecord:
    with engine_of(layers(case), terapipe_section(case), **options(case)) as engine:
        return _from_checkpoint(engine, case, folder)


def _from_checkpoint(engine: Any, case: Case, folder: str) -> RankRecord:
    """Train the second step, and return a record of its parameters."""
    assert engine.load_checkpoint(folder, tag="step1")[0] is not None
    engine.train_batch(iter(micro_batches(case, 0, 2)))
    record = RankRecord(engine.global_rank, engine.stage_id, 0, type(engine).__name__)
    record.parameters = to_numpy(dict(engine.module.named_parameters()))
    return record


def train_of_transformers(family: str) -> dict[str, float]:
    from tests.distributed.hugging_face_jobs import train_family

    return train_family(family, engines.section(slices=[8, 4, 4]), topology=topology(2))[0]


def ranks_of_tied_layers(axis: str) -> list[int]:
    """Build a module of one's own, whose constructor waits forever in DeepSpeed alone."""
    tied = [TiedLayerSpec("one weight", torch.nn.Linear, 4, 4) for _ in range(2)]
    terapipe_ds.register()
    try:
        module = PipelineModule(tied, topology=topology(2, axis=axis), partition_method="uniform")
        return list(module.tied_comms["one weight"]["ranks"])
    finally:
        terapipe_ds.unregister()


class Scaled(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * 2


class Mixed(nn.Module):
    """Subtract the mean over the call's tokens: a slice, or a rank's share of it."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden - hidden.mean(1, keepdim=True)


def checked_layers(slices: Any) -> tuple[tuple[str, str], tuple[str, str], str]:
    """Return the error of the first batch's check for each layer, and its report on the healthy one."""
    changes, found = {"verify": None, "slices": slices}, options(BASE)
    found["module"] = {**found.get("module", {}), "topology": topology(BASE.stages)}
    raised = []
    with engines.logged() as said:
        for layer in (Scaled(), Mixed()):
            model = [*layers(BASE)[:2], layer, *layers(BASE)[2:]]
            with engine_of(model, {**terapipe_section(BASE), **changes}, **found) as engine:
                raised.append(engines.step_error(engine, micro_batches(BASE, 0, 1)))
    return raised[0], raised[1], next((line for line in said if line.startswith("verify: ")), "")


class Numbered(Dataset[Any]):
    """Return rows that are identified by their first token."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = torch.arange(12) + index
        return row, row


def rows_of_the_loader(case: Case) -> tuple[int, list[int]]:
    """Return the size of a batch, and the first tokens of the first micro-batch."""
    made = mock.patch("deepspeed.runtime.dataloader.DataLoader", engines.loader_in_process)
    with made, engine_on(case, {}, initialize={"training_data": Numbered()}) as engine:
        tokens, _ = next(engine.data_iterator)
        return engine.train_batch_size(), tokens[:, 0].tolist()


def refusal(changes: dict[str, Any], options: dict[str, Any], case: Case = BASE) -> tuple[str, str]:
    def start() -> None:
        with engine_on(case, changes, **options):
            pass

    return engines.raised_by(start)


def dtype_of_reductions() -> tuple[str, str]:
    bf16 = {"bf16": {"enabled": True}, **engines.ZERO1, "seq_parallel_communication_data_type": "fp16"}
    settings = {"module": {"topology": topology(2)}, **bf16}
    with engine_of(engines.fp32_layers(), engines.unchecked(slices=2, granularity_tokens=2), **settings) as engine:
        return str(engine.communication_data_type), str(engine.optimizer.communication_data_type)


def error_of_other_rows(case: Case) -> str:
    with engine_on(case, {}) as engine:
        seed = int(engine.global_rank == 1)  # the second sequence rank of the first stage
        data = iter(micro_batches(replace(case, data_seed=seed), 0, 1))
        return engines.raised_by(lambda: engine.train_batch(data))[1]


class TestSequenceRanks:
    @pytest.mark.sample(2)
    @pytest.mark.parametrize(
        "case",
        [
            BASE,
            replace(BASE, kv_heads=2, schedule="seq1f1b-zb", checkpointing="non_reentrant"),
            replace(BASE, kv_heads=1, positions="learned", gpt3=True, loss_reduction="mean"),
            replace(BASE, stages=1, slices=(8, 4), kv_heads=2, checkpointing="reentrant", loss_reduction="sum"),
            replace(BASE, stages=1, data_parallel=2, clipping=True),
            replace(BASE, precision="fp32_zero1", clipping=True),
            PACKED,
            replace(PACKED, positions="learned", schedule="zbv"),
            replace(BASE, tied=True, clipping=True),
            replace(BASE, tied=True, schedule="zbv", precision="fp32_zero1"),
            replace(BASE, tied=True, schedule="chimera-seq", clipping=True),
            replace(BASE, tied=True, schedule="seq1f1b-interleaved-zb", clipping=True),
        ],
        ids=str,
    )
    def test_training_equals_one_process(self, case: Case) -> None:
        """Losses, gradients, clipped norms, parameters and evaluation."""
        run = rank_pool(RANKS).run(train_on_sequence_ranks, case=case)
        alone = replace(case, schedule="seq1f1b", checkpointing="off", stages=2)
        assert not cases.violations(cases.errors(run, train_alone(alone)), cases.contract(case))

    def test_bf16_sums_gradients_in_fp32_as_planned_strategies_do(self) -> None:
        case = replace(BASE, precision="bf16_zero1")
        run = rank_pool(RANKS).run(train_on_sequence_ranks, case=case)
        alone = train_alone(replace(BASE, precision="fp32_zero1"))
        limits = {**dict.fromkeys(cases.KINDS, 2e-2), "gradient": cases.BF16_GRADIENT_CAP}
        assert not cases.violations(cases.errors(run, alone), limits)

    @pytest.mark.parametrize("family", ["llama", "gpt2"])
    def test_models_of_transformers_equal_the_whole_model(self, family: str) -> None:
        """The embeddings of GPT-2 are tied."""
        pytest.importorskip("transformers", reason="needs the extra hf: pip install terapipe_ds[hf]")
        assert not engines.violations(rank_pool(RANKS).run(train_of_transformers, family=family))

    @pytest.mark.parametrize("axis", ["sequence", "tensor"])
    def test_tied_layers_have_a_group_for_each_place_on_an_axis(self, axis: str) -> None:
        assert rank_pool(RANKS).run(ranks_of_tied_layers, axis=axis) == [[0, 2], [1, 3]] * 2

    @pytest.mark.parametrize("slices", [(6, 2, 4), (12,)], ids=["three", "one"])
    def test_logits_of_an_evaluation_are_those_of_whole_sequences(self, slices: tuple[int, ...]) -> None:
        whole = Whole(layers(BASE))
        inputs = micro_batches(BASE, 0, 1)[-1][0]
        for logits in rank_pool(RANKS).run(logits_on_sequence_ranks, case=replace(BASE, slices=slices))[-2:]:
            with torch_attention(), torch.no_grad():
                assert cases.relative_error(logits, whole(inputs)) < 1e-10

    @pytest.mark.parametrize("changes", [{}, {"precision": "fp32_zero1"},
                                         {"precision": "fp32_zero1", "schedule": "interleaved"}])  # fmt: skip
    def test_a_checkpoint_is_resumed_and_has_each_layer_once(self, changes: dict[str, Any], tmp_path: Path) -> None:
        """Resume also on the same stages without sequence ranks, if ZeRO has not divided the states."""
        case = replace(BASE, **changes)
        run = rank_pool(RANKS).run(save_and_resume, case=case, folder=str(tmp_path))
        limit, alone = cases.contract(case)["parameter"], train_alone(case)
        assert cases.errors(run, alone)["parameter"].error <= limit
        saved = sorted(path.name for path in (tmp_path / "step1").glob("layer_*"))
        assert saved == [f"layer_{index:02d}-model_states.pt" for index in range(len(saved))]
        if not changes:
            run = rank_pool(2).run(resume, case=case, folder=str(tmp_path))
            assert cases.errors(run, alone)["parameter"].error <= limit

    def test_the_loader_of_deepspeed_gives_all_sequence_ranks_the_same_rows(self) -> None:
        """Two replicas of two sequence ranks each; the batch counts replicas."""
        results = rank_pool(RANKS).run(rows_of_the_loader, case=replace(BASE, stages=1, data_parallel=2))
        assert [rows for _, rows in results] == [[0, 2], [0, 2], [1, 3], [1, 3]]
        assert {size for size, _ in results} == {BASE.rows * BASE.micro_batches * 2}

    @pytest.mark.parametrize(
        ("changes", "options", "message"),
        [
            ({"slices": [7, 5]}, {}, r"slices of 7, 5 tokens are no multiples of 2"),
            ({}, {"sequence_parallel_size": 4}, r"sequence_parallel_size = 4, but the topology.*sizes \[2, 1, 2\]"),
            ({}, {"axis": "tensor", "gradient_clipping": 0.5}, r"gradient_clipping = 0.5 with the axis 'tensor'"),
            ({}, {"gradient_allreduce_op": "SUM"}, r'gradient_allreduce_op = "sum" with a topology.*be 2 times'),
        ],
        ids=["lengths", "key", "axis", "sum"],
    )
    def test_what_does_not_work_is_refused(
        self, changes: dict[str, Any], options: dict[str, Any], message: str
    ) -> None:
        for kind, text in rank_pool(RANKS).run(refusal, changes=changes, options=options):
            assert kind == "TeraPipeConfigError"
            assert re.search(message, text)

    def test_gradients_travel_in_the_dtype_for_sequence_ranks(self) -> None:
        assert rank_pool(RANKS).run(dtype_of_reductions) == [("torch.float16", "torch.float16")] * RANKS

    @pytest.mark.sample(1)
    @pytest.mark.parametrize("slices", [(6, 2, 4), 1])
    def test_layers_are_checked_with_the_shares_as_slices(self, slices: Any) -> None:
        """No foreign layer mixes tokens of one rank without a word, also where a sequence is one slice."""
        results = rank_pool(RANKS).run(checked_layers, slices=slices)
        assert re.match(r"verify: 8 layers and the loss agree on [23] slices \(.*\) of a sequence of 12", results[0][2])
        assert [healthy for healthy, _, _ in results] == [("", "")] * RANKS
        kind, text = of_rank_0([wrong for _, wrong, _ in results])
        assert kind == "VerifyError" and "layer 2 (Mixed)" in text

    def test_other_rows_on_a_sequence_rank_are_refused(self) -> None:
        for text in rank_pool(RANKS).run(error_of_other_rows, case=BASE):
            assert "ranks of one replica have drawn different data" in text
            assert "inputs of sequence ranks [0, 1] (stage 0, replica 0)" in text

    @pytest.mark.parametrize(
        "changes",
        [
            pytest.param({"slices": "auto"}, id="slices"),
            pytest.param({"slices": "auto", "schedule": "auto"}, marks=pytest.mark.full, id="schedule"),
            pytest.param({"slices": [6, 2, 4], "schedule": "auto"}, id="listed"),
        ],
    )
    def test_slices_are_planned_from_measured_shares(self, changes: dict[str, Any], tmp_path: Path) -> None:
        """Every slice is a multiple of the ranks, although the granularity is one token."""
        planned = {**changes, "granularity_tokens": 1, "planner": {"cache_dir": str(tmp_path)}}
        run = rank_pool(RANKS).run(engines.with_few_rounds, job=train_on_sequence_ranks, case=BASE, **planned)
        assert not cases.violations(cases.errors(run, train_alone(BASE)), cases.contract(BASE))
        (profile,) = tmp_path.glob("profile-*.json")
        assert "slices in multiples of 2 tokens" in profile.read_text()
