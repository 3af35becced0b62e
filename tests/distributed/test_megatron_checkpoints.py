"""Test checkpoints of GPTs of megatron-core layers: the same layout, another plan and schedule, another TP x PP x DP.

The writer of a checkpoint trains on, and so does the reader; both must get the same results. States are compared whole:
tensor-parallel parts are joined by megatron-core's own facts about its layers, not by the converter's patterns.
"""

import functools
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("megatron.core")

from terapipe_ds.config import TeraPipeConfigError
from tests.distributed import megatron_cases
from tests.distributed.cases import worst_error
from tests.distributed.checkpoint_states import convert
from tests.distributed.engines import error_of, raised_by
from tests.distributed.harness import rank_pool
from tests.distributed.megatron_cases import Case
from tests.distributed.megatron_models import engine_of, held_by, is_gated, train

BASE = Case(
    "tp2_pp2_sp", accumulation=2, precision="fp32_zero1", block="swiglu_biases", heads="gqa", qk_norm=True, num_layers=2
)
TIED = replace(BASE, tied=True)
HALF = replace(TIED, precision="bf16_zero1", block="gelu", positions="learned")
# of four ranks: two, two, four replicas and one; the last with half a query group per tensor-parallel rank
LAYOUTS: list[Any] = ["dp4", "pp2_dp2", "tp2_dp2", "tp4"]
OTHER_PLAN = {"schedule": "terapipe", "plan": "equal"}
UNIVERSAL = {"checkpoint": {"load_universal": True}}
# effect on losses of four bf16 roundings in another order; moments of single tensors differ by up to 0.03 per step
LIMITS = {"fp32": 1e-5, "bf16": 3e-3}


def limit_of(case: Case) -> float:
    return LIMITS[case.precision.split("_")[0]]


# -- jobs ----------------------------------------------------------------------------------------------------


def job_write(case: Case, folder: str, universal: bool = False) -> dict[str, Any]:
    """Make two steps, a checkpoint, two more steps; return the saved states and the later losses."""
    with engine_of(case) as engine:
        train(engine, case, range(2))
        engine.save_checkpoint(folder, tag="two", client_state={"epoch": 7})
        saved = held_by(engine)
        losses = train(engine, case, range(9, 11))
        found = {"saved": saved, "losses": losses, "later": held_by(engine)}
    if universal:
        convert(folder, "two")
    return found


def job_read(case: Case, folder: str, ds_config: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """Make one step, so that there is something to overwrite, then load the saved states, then make two steps."""
    with engine_of(case, **(ds_config or {})) as engine:
        train(engine, case, [4])
        before = held_by(engine)
        _, client_state = engine.load_checkpoint(folder, **options)
        saved, steps = held_by(engine), engine.global_steps
        losses = train(engine, case, range(9, 11))
        found = {"before": before, "saved": saved, "losses": losses, "later": held_by(engine)}
        return found | {"steps": steps, "epoch": client_state.get("epoch")}


def losses(results: list[dict[str, Any]]) -> list[float]:
    """Return the losses of the last stages, which must all be the same."""
    told = [result["losses"] for result in results if result["losses"]]
    assert np.ptp(np.array(told), axis=0).max() == 0.0
    return told[0]


def merged(results: Sequence[dict[str, Any]], when: str, gated: bool = True) -> dict[str, Any]:
    return megatron_cases.merged([result[when] for result in results], gated)


def errors_of(results: list[dict[str, Any]], expected: list[dict[str, Any]], when: str, case: Case) -> dict[str, float]:
    ours, theirs = (merged(each, when, is_gated(case)) for each in (results, expected))
    assert all(ours[kind].keys() == theirs[kind].keys() for kind in theirs)
    return {kind: worst_error(ours[kind], theirs[kind]).error for kind in theirs}


# -- the same layout -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """(folder, results) of a checkpoint that TP2 x PP2 wrote, embeddings tied."""
    folder = tmp_path_factory.mktemp("plain")
    return folder, rank_pool(4).run(job_write, case=TIED, folder=str(folder))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "case", [TIED, replace(TIED, precision="fp32", positions="learned"), replace(TIED, precision="bf16_zero1")], ids=str
)
def test_training_goes_on_as_if_it_had_not_been_interrupted(case: Case, plain: Any, tmp_path: Path) -> None:
    job = {"case": case, "folder": str(tmp_path)}
    folder, written = plain if case == TIED else (tmp_path, rank_pool(4).run(job_write, **job))
    read = rank_pool(4).run(job_read, **job | {"folder": str(folder)})
    for writer, reader in zip(written, read, strict=True):
        for when in ("saved", "later"):
            assert bits(reader[when]) == bits(writer[when])
        assert bits(reader["before"]) != bits(writer["saved"])
        assert (reader["steps"], reader["epoch"]) == (2, 7)
    assert losses(read) == losses(written)
    merged(read, "saved")  # tied copies are alike


def bits(record: megatron_cases.Record) -> dict[str, dict[str, bytes]]:
    return {kind: {name: value.tobytes() for name, value in tensors.items()} for kind, tensors in record.states.items()}


# -- another layout, without conversion ----------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [  # changes of the case, options, what is said
    ({"layout": "pp2_dp2"}, {}, r"saved by 2 tensor-parallel ranks, and 1 would load it.*ds_to_universal"),
    ({"layout": "pp2_dp2"}, {"load_module_only": True}, r"saved by 2 tensor-parallel ranks, and 1 would load it"),
    ({"layout": "tp2_dp2"}, {}, r"saved by 2 stages, and 1 would load it.*_only=True \(in a Trainer"),
    ({"tied": False}, {}, r"of another model: share_embeddings_and_output_weights=True there and False here"),
    ({"vocab_size": 64}, {}, r"of another model: vocab_size=32 there and 64 here"),
    ({"precision": "fp32"}, {}, r"universal checkpoint is loaded by ZeRO stage 1, not by stage 0"),
    ({"precision": "bf16"}, {}, r"cannot load optimizer states in bf16 without ZeRO.*load_module_only=True"),
]


def test_parameters_alone_are_loaded_by_another_number_of_stages(plain: Any) -> None:
    folder, written = plain
    case = replace(TIED, layout="tp2_dp2")
    read = rank_pool(4).run(job_read, case=case, folder=str(folder), load_module_only=True)
    errors = errors_of(read, written, "saved", case)
    assert (errors["value"], errors["copy"]) == (0.0, 0.0)
    assert errors["exp_avg"] > 0.1, "moments stay as they were"


def job_refused(folder: str) -> list[str]:
    """Return the refusal of each engine; one after the other, because none of them ends the ranks."""
    said = []
    for changes, options, _ in REFUSED:
        case = replace(TIED, **changes)
        with engine_of(case, **(UNIVERSAL if case.precision == "fp32" else {})) as engine:
            before = dict(engine.module.state_dict())
            with pytest.raises(TeraPipeConfigError) as refused:
                engine.load_checkpoint(folder, tag="two", **options)
            assert error_of(dict(engine.module.state_dict()), before) == 0.0
            said.append(str(refused.value))
    return said


def test_what_would_be_loaded_wrongly_is_refused_on_every_rank(plain: Any) -> None:
    folder, _ = plain
    for said in rank_pool(4).run(job_refused, folder=str(folder)):
        for text, (*_, pattern) in zip(said, REFUSED, strict=True):
            assert re.search(pattern, text), text


def test_another_number_of_replicas_is_refused_with_zero(tmp_path: Path) -> None:
    rank_pool(2).run(job_write, case=replace(BASE, layout="pp2"), folder=str(tmp_path))
    act = functools.partial(job_read, replace(BASE, layout="pp2_dp2"), str(tmp_path))
    for _, text in rank_pool(4).run(raised_by, act=act):
        assert "saved by 1 data-parallel replicas, and 2 would load it: ZeRO splits" in text


# -- another layout, through a universal checkpoint ----------------------------------------------------------


def write_universal(case: Case, folder: Path) -> list[dict[str, Any]]:
    return rank_pool(4).run(job_write, case=case, folder=str(folder), universal=True)


def read_universal(case: Case, layout: str, folder: Path) -> list[dict[str, Any]]:
    other = replace(case, layout=layout, **OTHER_PLAN)
    return rank_pool(4).run(job_read, case=other, folder=str(folder), ds_config=UNIVERSAL)


@pytest.fixture(scope="module", params=[BASE, pytest.param(HALF, marks=pytest.mark.full)], ids=str)
def universal(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(case, folder, results) of a universal checkpoint that TP2 x PP2 wrote."""
    folder = tmp_path_factory.mktemp("universal")
    return request.param, folder, write_universal(request.param, folder)


@pytest.mark.parametrize("layout", [pytest.param(each, marks=pytest.mark.full) for each in LAYOUTS[1:]] + LAYOUTS[:1])
def test_a_universal_checkpoint_is_loaded_by_another_layout(layout: str, universal: Any) -> None:
    case, folder, written = universal
    read = read_universal(case, layout, folder)
    assert set(errors_of(read, written, "saved", case).values()) == {0.0}
    np.testing.assert_allclose(losses(read), losses(written), rtol=limit_of(case))
    assert {(result["steps"], result["epoch"]) for result in read} == {(2, 7)}
    if case.precision == "fp32_zero1":
        assert max(errors_of(read, written, "later", case).values()) <= 1e-5


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        # from four replicas, whose partitions cut through parameters, to TP2 x PP2
        pytest.param(replace(TIED, layout="dp4"), BASE.layout, marks=pytest.mark.full),
        (replace(BASE, block="moe"), "pp2_dp2"),
        pytest.param(replace(BASE, attention="latent, window, sinks"), "pp2_dp2", marks=pytest.mark.full),
    ],
    ids=["and back", "experts", "latents and sinks"],
)
def test_further_universal_checkpoints(case: Case, layout: str, tmp_path: Path) -> None:
    written = write_universal(case, tmp_path)
    read = read_universal(case, layout, tmp_path)
    assert any("local_experts.2.linear_fc1" in name for name in merged(read, "saved")["value"]) == (case.block == "moe")
    assert set(errors_of(read, written, "saved", case).values()) == {0.0}
    np.testing.assert_allclose(losses(read), losses(written), rtol=limit_of(case))
