"""Test that rows of several documents train in the engine as in a plain loop over each document alone."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from terapipe_ds.attention import carry
from tests import dict_batches
from tests.distributed import engines
from tests.distributed.cases import CARRIED, FULL, Case
from tests.distributed.harness import rank_pool
from tests.distributed.test_layers import check
from tests.small_models.parts import Attention, Calls, causal, cross_entropy
from tests.zoo.attentions import Sliced
from tests.zoo.members import spec_of, stack

PACKED = Case(slices=(7, 1, 4), kv_heads=2, masked=True, documents=True)
MIXED = [("attention", kind) for kind in CARRIED]
SCHEDULES = ("seq1f1b", "seq1f1b-zb", "zbv", "chimera-seq", "terapipe", "1f1b", "seq1f1b-interleaved")
CASES = [
    replace(PACKED, stages=stages, schedule=schedule, checkpointing=checkpointing, positions=positions, mixers=mixers)
    for stages in (2, 3)
    for schedule in SCHEDULES
    if stages == 2 or schedule != "chimera-seq"  # which wants an even number
    for checkpointing in ("off", "reentrant", "non_reentrant")
    for positions, mixers in (("rope", ("attention",)), ("learned", ("attention",)), *(("rope", m) for m in MIXED))
]
SAMPLE = [
    replace(PACKED, checkpointing="non_reentrant"),
    replace(PACKED, stages=3, schedule="seq1f1b-zb", positions="learned"),
    replace(PACKED, stages=1, data_parallel=2),
    replace(PACKED, schedule="seq1f1b-zb", mixers=MIXED[-1], checkpointing="reentrant"),
]
DICTS = replace(PACKED, masked=False, batch="position_ids")
DICT_CASES = [
    replace(DICTS, batch=form, stages=stages, slices=slices, schedule=schedule, positions=positions)
    for form in dict_batches.FORMS
    for stages, schedule in ((2, "seq1f1b"), (3, "seq1f1b-zb"), (2, "zbv"), (2, "chimera-seq"), (2, "1f1b"))
    for slices in ((7, 1, 4), 3, 1)
    for positions in ("rope", "learned")
]
DICT_SAMPLE = [
    DICTS,
    replace(DICTS, batch="cu_seq_lens_q", stages=1, data_parallel=2, checkpointing="non_reentrant"),
    replace(DICTS, batch="seq_idx", schedule="1f1b", slices=1, positions="learned"),
    replace(DICTS, batch="flattened", stages=3, schedule="seq1f1b-zb", micro_batches=3),
    replace(DICTS, batch="plain"),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", dict.fromkeys([*SAMPLE, *DICT_SAMPLE, *(CASES + DICT_CASES if FULL else ())]), ids=str)
def test_training_and_evaluation_equal_each_document_alone(case: Case) -> None:
    """Loss, gradients, parameters and evaluation, to 1e-10."""
    check(case)


@pytest.mark.parametrize("case", [PACKED, DICTS], ids=["tuple", "dict"])
def test_slices_are_planned_from_measured_rows_of_one_document(case: Case, tmp_path: Path) -> None:
    """Check that measuring cuts position ids with the tokens, and leaves nothing behind for the training."""
    planned = {"slices": "auto", "granularity_tokens": 4, "planner": {"cache_dir": str(tmp_path)}}
    check(case, **planned)
    assert len(list(tmp_path.glob("profile-*.json"))) == 1


# -- layers that mix documents ---------------------------------------------------------------------------------


def inputs_without_ids(inputs: Any) -> Tensor:
    tokens: Tensor = inputs[0]
    return tokens


def long_batch(edges: tuple[int, ...]) -> list[Any]:
    """Return two micro-batches: the second one has documents that start at `edges` in its second row."""
    (tokens, labels), (others, their) = (engines.micro_batch(i, length=200, masked=False) for i in range(2))
    ids = torch.arange(200).repeat(2, 1)
    later = ids.clone()
    for edge in edges:
        later[1, edge:] -= later[1, edge].item()
    return [((tokens, ids), labels), ((others, later), their)]


class SumOfSlices(nn.Module):
    """Add the sum of all tokens so far, which carries over slices and knows no edges within one."""

    def forward(self, x: Tensor) -> Tensor:
        before = carry.read("sum", "sum")
        sums = x.cumsum(1) if before is None else x.cumsum(1) + before[:, None]
        return x + carry.write("sum", "sum", sums[:, -1], sums / 200)


def losses_or_error(
    mixer: Any, edges: list[tuple[int, ...]], stages: int = 2, **section: Any
) -> tuple[list[float], str, list[str]]:
    """Train a step on each batch; return the losses, the error, and the log of the check of documents.

    With one stage, only the second of the two data-parallel ranks has rows of several documents.
    """
    torch.manual_seed(3)
    if stages == 1 and torch.distributed.get_rank() == 0:
        edges = [()] * len(edges)
    layers = [LayerSpec(Calls, inputs_without_ids), *map(spec_of, stack(mixer))]
    losses: list[float] = []
    given = engines.section(**{"documents": 1, "granularity_tokens": 1, **section})
    with engines.logged() as said, engines.engine_of(layers, given, stages=stages, loss_fn=cross_entropy) as engine:
        steps = (losses.append(float(engine.train_batch(iter(long_batch(each))))) for each in edges)
        error = engines.raised_by(lambda: list(steps))
    return losses, ": ".join(error), [line for line in said if "keep to the documents" in line]


def error_of_evaluation() -> tuple[str, str]:
    layers = [LayerSpec(Calls, inputs_without_ids), *map(spec_of, stack(LayerSpec(Attention, causal)))]
    with engines.engine_of(layers, engines.section(documents=1, slices=1), loss_fn=cross_entropy) as engine:
        return engines.raised_by(lambda: engine.eval_batch(iter(long_batch((150,)))))


class TestTwoRanks:
    @pytest.mark.parametrize("edges", [[(150,)], [(), (3, 190)]], ids=["first batch", "second batch"])
    @pytest.mark.parametrize("stages", [1, 2])
    @pytest.mark.parametrize("slices", [1, 4])
    def test_a_layer_that_mixes_documents_is_named_on_every_rank(
        self, stages: int, slices: int, edges: list[tuple[int, ...]]
    ) -> None:
        """A softmax by hand on one slice, and a sum that carries over slices but not over their edges."""
        mixer = LayerSpec(Attention, causal) if slices == 1 else LayerSpec(SumOfSlices)
        job: dict[str, Any] = {"mixer": mixer, "edges": edges, "slices": slices, "stages": stages}
        for losses, error, _ in rank_pool(2).run(losses_or_error, **job):
            assert len(losses) == len(edges) - 1
            assert re.search(r"^VerifyError: .*\n  layer 2 \(\w+\): output of .* the layer mixes documents", error), (
                error
            )

    def test_an_evaluation_is_checked_as_well(self) -> None:
        for kind, text in rank_pool(2).run(error_of_evaluation):
            assert kind == "VerifyError" and "layer 2 (Attention)" in text

    @pytest.mark.sample(1)
    @pytest.mark.parametrize("stages", [2, 1])
    @pytest.mark.parametrize("slices", [1, 4])
    def test_training_is_bit_for_bit_what_it_is_without_the_check(self, stages: int, slices: int) -> None:
        edges = [(), (50, 120), (3,)]
        job: dict[str, Any] = {"mixer": LayerSpec(Sliced, 0), "edges": edges, "slices": slices, "stages": stages}
        checked, unchecked = (rank_pool(2).run(losses_or_error, **job, verify=verify) for verify in (None, "off"))
        for (losses, error, _), (others, *nothing) in zip(checked, unchecked, strict=True):
            assert losses == others and error == ": " and nothing == [": ", []]
        assert len(checked[0][2]) == 1 and "6 layers keep to the documents" in checked[0][2][0]
