"""Checkpoints know nothing of layouts either: stages that hold several parts, or parts at two places, read what others
have written and go on, and so does DeepSpeed's own engine.

States are compared by the names of parameters, as DeepSpeed's own functions tell them of a running engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor

from tests.distributed.engines import batches, engine_of, error_of, gpt_layers, relative_error, section, train
from tests.distributed.harness import rank_pool

SYSTEMS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "plain": section(slices=3),
    "interleaved": section(schedule="interleaved", chunks_per_stage=2),
    "interleaved3": section(schedule="seq1f1b-interleaved", chunks_per_stage=3),
    "chimera": section(schedule="chimera"),
    "zbv": section(schedule="zbv", chunks_per_stage=2),
}
HALF = {"fp16": {"enabled": True, "initial_scale_power": 6, "loss_scale_window": 2}}
ZERO1 = {"zero_optimization": {"stage": 1}}
FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp64": {},
    "fp32": {},
    "fp32_zero1": ZERO1,
    "fp16": HALF,
    "fp16_zero1": {**HALF, **ZERO1},
    "bf16_zero1": {"bf16": {"enabled": True}, **ZERO1},
    "bf16_zero1_fp32_sums": {"bf16": {"enabled": True}, **ZERO1, **FP32_SUMS},
}
STEPS = 2


@dataclass(frozen=True)
class Chain:
    """Who trains in turn, each from what the one before has saved."""

    systems: tuple[str, ...]
    precision: str = "fp64"
    stages: int = 2
    num_layers: int = 4

    def __str__(self) -> str:
        return "-".join([*self.systems, self.precision, f"K{self.stages}"])

    def engine(self, system: str) -> Any:
        dtype = "float64" if self.precision == "fp64" else "float32"
        layers = gpt_layers(dtype=dtype, tied_embedding=True, num_layers=self.num_layers)
        return engine_of(layers, SYSTEMS[system], stages=self.stages, **PRECISIONS[self.precision])


def states_of(engine: PipelineEngine) -> dict[str, dict[str, Tensor]]:
    """Parameter -> its value, its fp32 copy, and what the optimizer has of it."""
    return {name: _state_of(engine, p) for name, p in engine.module.named_parameters()}


def _state_of(engine: PipelineEngine, parameter: torch.nn.Parameter) -> dict[str, Tensor]:
    found = {"value": parameter.detach().clone()}
    if hasattr(parameter, "_hp_mapping"):
        tell = deepspeed.utils.safe_get_full_optimizer_state
        found["copy"] = deepspeed.utils.safe_get_full_fp32_param(parameter).clone()
        return found | {key: tell(parameter, key).clone() for key in ("exp_avg", "exp_avg_sq")}
    held = parameter
    if hasattr(engine.optimizer, "fp32_groups"):
        (group,), (copies,) = engine.optimizer.fp16_groups, engine.optimizer.fp32_groups
        held = next(copy for each, copy in zip(group, copies, strict=True) if each is parameter)
        found["copy"] = held.detach().clone()
    return found | {key: value.clone() for key, value in engine.optimizer.state[held].items()}


def job_chain(chain: Chain, folder: str) -> list[dict[str, Any]]:
    """What each had loaded and saved, and its losses."""
    found = []
    for turn, system in enumerate(chain.systems):
        with chain.engine(system) as engine:
            if turn:
                train(engine, batches(1, first_seed=400))  # states that are to be overwritten
                engine.load_checkpoint(folder)
            loaded, steps = states_of(engine) if turn else {}, engine.global_steps
            run = train(engine, batches(STEPS, first_seed=10_000 * turn))
            engine.save_checkpoint(folder)
            found.append({"loaded": loaded, "steps": steps, "saved": states_of(engine), "losses": run.returned})
    return found


def job_alone(chain: Chain, system: str, turns: int) -> dict[str, Any]:
    """The same steps by one engine that never stops."""
    with chain.engine(system) as engine:
        losses = [train(engine, batches(STEPS, first_seed=10_000 * turn)).returned for turn in range(turns)]
        return {"losses": losses, "saved": states_of(engine)}


def by_name(ranks: list[dict[str, dict[str, Tensor]]]) -> dict[str, dict[str, Tensor]]:
    """What all ranks have; those that have the same parameter must have the very same of it."""
    merged: dict[str, dict[str, Tensor]] = {}
    for rank in ranks:
        for name, state in rank.items():
            assert error_of(state, merged.setdefault(name, state)) == 0.0, name
    return merged


def run_chain(chain: Chain, folder: Path, ranks: int | None = None) -> list[list[dict[str, Any]]]:
    """By turn and rank; what was loaded is what was saved."""
    pool = rank_pool(ranks or chain.stages)
    turns = list(zip(*pool.run(job_chain, chain=chain, folder=str(folder)), strict=True))
    for turn in range(1, len(turns)):
        loaded = by_name([rank["loaded"] for rank in turns[turn]])
        assert error_of(loaded, by_name([rank["saved"] for rank in turns[turn - 1]])) == 0.0
        assert {rank["steps"] for rank in turns[turn]} == {STEPS * turn}
        assert all(len(state) >= 3 for state in loaded.values()), "moments are among it"
    return [list(turn) for turn in turns]


FP64 = [
    Chain(("stock", "interleaved", "chimera", "stock", "zbv", "interleaved3", "plain")),
    Chain(("chimera", "interleaved", "stock"), stages=4, num_layers=6),
]


@pytest.mark.parametrize("chain", FP64, ids=str)
def test_each_layout_goes_on_where_another_has_stopped(chain: Chain, tmp_path: Path) -> None:
    turns = run_chain(chain, tmp_path)
    alone = rank_pool(chain.stages).run(job_alone, chain=chain, system="stock", turns=len(chain.systems))
    for turn, losses in enumerate(alone[0]["losses"]):
        assert turns[turn][0]["losses"] == pytest.approx(losses, rel=1e-6)  # rank 0 is told them in fp32
    ours, theirs = by_name([rank["saved"] for rank in turns[-1]]), by_name([rank["saved"] for rank in alone])
    assert ours.keys() == theirs.keys()
    for name, state in theirs.items():
        for key, value in state.items():
            assert relative_error(ours[name][key], value, 1e-3) <= 1e-10, (name, key)


@pytest.mark.parametrize("precision", [name for name in PRECISIONS if name != "fp64"])
def test_every_precision_keeps_its_states(precision: str, tmp_path: Path) -> None:
    run_chain(Chain(("stock", "interleaved", "chimera", "stock"), precision), tmp_path)


def test_replicas_that_share_states(tmp_path: Path) -> None:
    run_chain(Chain(("interleaved", "stock", "chimera", "interleaved"), "fp32_zero1"), tmp_path, ranks=4)


@pytest.mark.parametrize(
    ("system", "precision"), [("interleaved", "bf16_zero1"), ("chimera", "fp32_zero1"), ("chimera", "fp64")]
)
def test_the_same_layout_goes_on_bit_by_bit(system: str, precision: str, tmp_path: Path) -> None:
    chain = Chain((system, system), precision)
    turns = run_chain(chain, tmp_path)
    alone = rank_pool(2).run(job_alone, chain=chain, system=system, turns=2)
    for rank, before in zip(turns[1], alone, strict=True):
        assert rank["losses"] == before["losses"][1]
        assert error_of(rank["saved"], before["saved"]) == 0.0
