"""Test that rows of several documents train in the engine as in a plain loop over each document alone."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests import dict_batches, mutation_check
from tests.distributed.cases import CARRIED, FULL, Case
from tests.distributed.faults import FAULTS
from tests.distributed.test_layers import check

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


@pytest.mark.sample(3)
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


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "fault",
    [
        "edges_of_one_row_ignored", "edges_of_another_micro_batch", "no_edges_in_recompute",
        "labels_of_a_dict_as_they_are", "labels_over_edges", "labels_of_padding", "edges_of_a_dict_ignored",
    ],
)  # fmt: skip
def test_wrong_edges_are_seen(fault: str) -> None:
    assert mutation_check.is_right(FAULTS[fault].configuration)
    assert mutation_check.caught_by(FAULTS[fault]).net != mutation_check.SURVIVED
