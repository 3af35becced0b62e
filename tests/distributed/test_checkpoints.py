"""Test that checkpoints do not depend on slices or layouts: every plan, schedule, layout and engine, DeepSpeed's too,
reads the checkpoint of another one and goes on.

States are compared by the names of parameters, as DeepSpeed's own functions return them for a running engine.
"""

import contextlib
import functools
import itertools
import math
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.topology import ProcessTopology
from torch import Tensor

import terapipe_ds
from terapipe_ds.models.gpt import gpt_loss
from terapipe_ds.runtime.checkpoints.manifest import MANIFEST
from terapipe_ds.runtime.checkpoints.optimizer_forms import Shard
from terapipe_ds.runtime.layout.layer_names import NOTHING_TRAINED
from tests.distributed import engines
from tests.distributed.checkpoint_states import as_older_versions, convert, states_of
from tests.distributed.harness import rank_pool

SYSTEMS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "seq1f1b": engines.unchecked(slices=3),
    "terapipe": engines.unchecked(slices=[5, 10, 7, 1], schedule="terapipe"),
    "interleaved": engines.unchecked(schedule="interleaved", chunks_per_stage=2),
    "interleaved3": engines.unchecked(schedule="seq1f1b-interleaved", chunks_per_stage=3),
    "chimera": engines.unchecked(schedule="chimera"),
    "zbv": engines.unchecked(schedule="zbv", chunks_per_stage=2),
}
HALF = {"fp16": {"enabled": True, "initial_scale_power": 6, "loss_scale_window": 2}}
FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp64": {},
    "fp32": {},
    "fp32_zero1": engines.ZERO1,
    "fp16": HALF,
    "fp16_zero1": {**HALF, **engines.ZERO1},
    "bf16": {"bf16": {"enabled": True}},
    "bf16_zero1": {"bf16": {"enabled": True}, **engines.ZERO1},
    "bf16_zero1_fp32_sums": {"bf16": {"enabled": True}, **engines.ZERO1, **FP32_SUMS},
}
FORMS = [
    ("fp32", "fp32_zero1"), ("fp32_zero1", "fp32"), ("fp32_zero1", "bf16_zero1"), ("bf16_zero1", "fp16_zero1"),
    ("fp32", "fp16"), ("fp16", "fp32"), ("fp16_zero1", "fp16"), ("fp16", "fp16_zero1"),
    ("bf16", "fp16"),
]  # fmt: skip
STEPS = 2
WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-4, "warmup_max_lr": 1e-3, "warmup_num_steps": 9}}
LAYER_2 = "layer_02-model_states.pt"


def full(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.full)


@dataclass(frozen=True)
class Chain:
    """List the engines that train in turn, each from the previous one's checkpoint."""

    systems: tuple[str, ...]
    precision: str = "fp64"
    stages: int = 2
    num_layers: int = 4
    tied: bool = True

    def __str__(self) -> str:
        return "-".join([*self.systems, self.precision, f"K{self.stages}"])

    def engine(self, system: str, **changes: Any) -> Any:
        dtype = "float64" if self.precision == "fp64" else "float32"
        layers = engines.gpt_layers(dtype=dtype, tied_embedding=self.tied, num_layers=self.num_layers)
        return engines.engine_of(layers, SYSTEMS[system], stages=self.stages, **PRECISIONS[self.precision], **changes)


def job_chain(chain: Chain, folder: str) -> list[dict[str, Any]]:
    """Return the states that each had loaded and saved, and its losses."""
    found: list[dict[str, Any]] = []
    for turn, system in enumerate(chain.systems):
        with chain.engine(system, scheduler=WARMUP) as engine:
            entry: dict[str, Any] = {"loaded": {}}
            if turn:
                engines.train(engine, engines.batches(1, first_seed=400))  # states that are to be overwritten
                entry["before"] = states_of(engine)
                _, client = engine.load_checkpoint(folder)
                entry |= {"loaded": states_of(engine), "engine loaded": counters_of(engine), "client": client["turn"]}
            run = engines.train(engine, engines.batches(STEPS, first_seed=10_000 * turn))
            engine.save_checkpoint(folder, client_state={"turn": turn})
            if not turn and system != "stock":
                as_older_versions(folder)
            saved = {"saved": states_of(engine), "engine saved": counters_of(engine)}
            found.append(entry | saved | {"losses": run.returned})
    return found


def counters_of(engine: PipelineEngine) -> dict[str, Any]:
    """Return the counters that a checkpoint restores beside the states of parameters."""
    scaler = getattr(engine.optimizer, "loss_scale_config", None)
    return {
        "rates": [float(lr) for lr in engine.get_lr()],
        "steps": [engine.global_steps, engine.global_samples, engine.skipped_steps],
        "scheduler": engine.lr_scheduler.state_dict(),
        "loss scale": float(engine._get_optimizer_loss_scale() or 0.0) if engine.fp16_enabled() else 0.0,
        "good steps": scaler.cur_iter if engine.fp16_enabled() and scaler is not None else 0,
    }


def job_alone(chain: Chain, system: str, turns: int) -> dict[str, Any]:
    """Make the same steps with one engine that never stops."""
    with chain.engine(system, scheduler=WARMUP) as engine:
        losses = [
            engines.train(engine, engines.batches(STEPS, first_seed=10_000 * turn)).returned for turn in range(turns)
        ]
        return {"losses": losses, "saved": states_of(engine)}


def by_name(ranks: list[dict[str, dict[str, Tensor]]]) -> dict[str, dict[str, Tensor]]:
    """Merge the states of all ranks; ranks with the same parameter must have identical states of it."""
    merged: dict[str, dict[str, Tensor]] = {}
    for rank in ranks:
        for name, state in rank.items():
            if name.startswith(NOTHING_TRAINED):  # of this stage alone
                continue
            assert engines.error_of(state, merged.setdefault(name, state)) == 0.0, name
    return merged


def run_chain(chain: Chain, folder: Path, ranks: int | None = None) -> list[list[dict[str, Any]]]:
    """Run the chain; return results by turn and rank; check that the loaded states equal the saved ones."""
    pool = rank_pool(ranks or chain.stages)
    turns = list(zip(*pool.run(job_chain, chain=chain, folder=str(folder)), strict=True))
    for turn in range(1, len(turns)):
        loaded = by_name([rank["loaded"] for rank in turns[turn]])
        saved = by_name([rank["saved"] for rank in turns[turn - 1]])
        assert engines.error_of(loaded, saved) == 0.0
        assert engines.error_of(by_name([rank["before"] for rank in turns[turn]]), saved) > 1e-4, (
            "there is something to load"
        )
        for rank, before in zip(turns[turn], turns[turn - 1], strict=True):
            assert rank["engine loaded"] == before["engine saved"]
            assert (rank["engine loaded"]["steps"][0], rank["client"]) == (STEPS * turn, turn - 1)
        assert all(len(state) >= 4 for state in loaded.values()), "moments are among it"
    return [list(turn) for turn in turns]


FP64 = [
    Chain(("stock", "interleaved", "chimera", "zbv", "stock", "terapipe", "stock")),
    full(Chain(("chimera", "interleaved", "stock"), stages=4, num_layers=6)),
    full(Chain(("seq1f1b", "chimera", "seq1f1b", "interleaved3", "chimera", "zbv", "interleaved"))),
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
            assert engines.relative_error(ours[name][key], value, 1e-3) <= 1e-10, (name, key)


LAYOUTS = "interleaved", "stock", "chimera", "terapipe"
KEPT = [  # chains and ranks
    (Chain(LAYOUTS, "bf16_zero1_fp32_sums"), 2),
    *(full(Chain(LAYOUTS, each), 2) for each in ("fp16", "bf16_zero1", "fp32", "fp32_zero1", "fp16_zero1")),
    # replicas that share states
    (Chain(("interleaved", "stock", "chimera"), "fp32_zero1"), 4),
    full(Chain(("terapipe", "stock", "seq1f1b"), "fp32_zero1", stages=1), 2),
]


@pytest.mark.parametrize(("chain", "ranks"), KEPT, ids=str)
def test_every_precision_keeps_its_states(chain: Chain, ranks: int, tmp_path: Path) -> None:
    run_chain(chain, tmp_path, ranks)


def job_another_form(saver: str, loader: str, folder: str) -> tuple[tuple[str, str], float]:
    """Return the error of a load, and how far the parameters are from those before."""
    with Chain((), saver).engine("seq1f1b") as engine:
        engines.train(engine, engines.batches(1))
        engine.save_checkpoint(folder)
    with Chain((), loader).engine("seq1f1b") as engine:
        before = {name: each.detach().clone() for name, each in engine.module.named_parameters()}
        error = engines.raised_by(lambda: engine.load_checkpoint(folder))
        distance = engines.error_of(dict(engine.module.named_parameters()), before)
        engines.train(engine, engines.batches(1))
        return error, distance


@pytest.mark.parametrize(
    ("saver", "loader"),
    [("fp32", "bf16_zero1"), ("bf16_zero1", "fp16"), *map(full, *zip(*FORMS, strict=True))],
)
def test_states_of_another_precision_or_zero_stage_are_refused(saver: str, loader: str, tmp_path: Path) -> None:
    for error, distance in rank_pool(2).run(job_another_form, saver=saver, loader=loader, folder=str(tmp_path)):
        text = rf"saved in {_form(saver)}, and this engine trains in {_form(loader)}, .*load_module_only=True"
        assert error[0] == "TeraPipeConfigError"
        assert re.search(text, error[1])
        assert distance == 0.0


def job_without_states(saver: str, loader: str, folder: str) -> tuple[float, float, int]:
    """Return the errors of the parameters and of the copies that the optimizer trains, and the number of steps."""
    with Chain((), saver).engine("seq1f1b") as engine:
        engines.train(engine, engines.batches(2))
        engine.save_checkpoint(folder)
        saved = {name: each.detach().clone() for name, each in engine.module.named_parameters()}
    with Chain((), loader).engine("seq1f1b") as engine:
        engines.train(engine, engines.batches(1, first_seed=900))
        engine.load_checkpoint(folder, load_optimizer_states=False)
        there = states_of(engine)
        saved = {name: value.to(there[name]["value"].dtype).float() for name, value in saved.items()}
        kinds = ({name: state[kind].float() for name, state in there.items()} for kind in ("value", "copy"))
        errors = [engines.error_of(kind, saved) for kind in kinds]
        return errors[0], errors[1], engine.global_steps


@pytest.mark.parametrize(("saver", "loader"), [("fp32", "bf16_zero1"), full("fp16_zero1", "fp32_zero1"),
                                               full("bf16", "fp32_zero1")])  # fmt: skip
def test_parameters_and_steps_need_no_states_of_the_same_form(saver: str, loader: str, tmp_path: Path) -> None:
    for found in rank_pool(2).run(job_without_states, saver=saver, loader=loader, folder=str(tmp_path)):
        assert found == (0.0, 0.0, 2)


def job_another_optimizer(precision: str, types: tuple[str, str], folder: str) -> list[tuple[str, str]]:
    """Return the errors of a load into an optimizer of the second type, and of the step after it."""
    saved, loaded = ({"type": kind, "params": {"lr": 1e-3, **OPTIMIZERS[kind]}} for kind in types)
    with Chain((), precision).engine("seq1f1b", optimizer=saved, **ANY) as engine:
        engines.train(engine, engines.batches(1))
        engine.save_checkpoint(folder)
    with Chain((), precision).engine("seq1f1b", optimizer=loaded, **ANY) as engine:
        return [engines.raised_by(lambda: engine.load_checkpoint(folder)), engines.step_error(engine)]


ANY = {"zero_allow_untested_optimizer": True}
OPTIMIZERS = {"SGD": {"momentum": 0.9}, "Adam": {"torch_adam": True}}


@pytest.mark.parametrize(("precision", "types", "lost"), [
    ("fp32", ("Adam", "SGD"), "momentum"), ("fp32", ("SGD", "Adam"), "betas"),
    ("bf16_zero1", ("Adam", "SGD"), "momentum"),
])  # fmt: skip
def test_states_of_another_optimizer_are_refused(
    precision: str, types: tuple[str, str], lost: str, tmp_path: Path
) -> None:
    """The stock engine fails with a KeyError, often in its next step only."""
    for load, step in rank_pool(2).run(job_another_optimizer, precision=precision, types=types, folder=str(tmp_path)):
        assert load[0] == "TeraPipeConfigError" and step[0] == "CheckpointError"
        assert re.search(rf"another optimizer than {types[1]}.*lack .*{lost}.*load_module_only=True", load[1])


STEPPED = {"lr_scheduler": functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)}
SCHEDULERS = {"none": {}, "WarmupLR": {"scheduler": WARMUP}, "StepLR": {"initialize": STEPPED}}


def job_another_scheduler(saver: str, loader: str, folder: str) -> list[tuple[str, str]]:
    """Return the errors of a load, of one without the scheduler's state, and of the step that follows."""
    with engines.engine_of(engines.fp32_layers(), engines.unchecked(), **SCHEDULERS[saver]) as engine:
        engines.train(engine, engines.batches(1))
        engine.save_checkpoint(folder)
    with engines.engine_of(engines.fp32_layers(), engines.unchecked(), **SCHEDULERS[loader]) as engine:
        first = engines.raised_by(lambda: engine.load_checkpoint(folder))
        second = engines.raised_by(lambda: engine.load_checkpoint(folder, load_lr_scheduler_states=False))
        return [first, second, engines.step_error(engine)]


@pytest.mark.parametrize(
    ("saver", "loader", "told"),
    [
        ("none", "WarmupLR", "no state of a learning rate scheduler, and this engine has a WarmupLR with last_batch_"),
        ("StepLR", "WarmupLR", r"the state of another scheduler \(step_size, .*begin WarmupLR anew with load_lr_sched"),
        ("WarmupLR", "StepLR", r"another scheduler \(last_batch_iteration\), and this engine has a StepLR with step"),
        ("StepLR", "StepLR", ""),
        ("WarmupLR", "none", ""),
    ],
)
def test_states_of_another_scheduler_are_refused(saver: str, loader: str, told: str, tmp_path: Path) -> None:
    for first, *others in rank_pool(2).run(job_another_scheduler, saver=saver, loader=loader, folder=str(tmp_path)):
        assert first[0] == ("TeraPipeConfigError" if told else "") and re.search(told, first[1]), first
        assert others == [("", "")] * 2


def job_not_loaded(folder: str) -> list[Any]:
    """Return the log of a start, and the errors of loads that DeepSpeed fails in, of one without states, of a step."""
    zero = {"stage": 1, "elastic_checkpoint": True}
    with engines.logged() as log, Chain((), "fp32").engine("seq1f1b", zero_optimization=zero) as engine:
        engines.train(engine, engines.batches(1))
        engine.save_checkpoint(folder)
        options = {}, {"load_module_only": True, "custom_load_fn": print}, {"load_optimizer_states": False}
        errors = [engines.raised_by(functools.partial(engine.load_checkpoint, folder, **each)) for each in options]
        return [" ".join(log), *errors, engines.step_error(engine)]


def test_loads_that_deepspeed_cannot_make_are_refused_before_anything_changes(tmp_path: Path) -> None:
    for told, elastic, custom, *others in rank_pool(2).run(job_not_loaded, folder=str(tmp_path)):
        assert (elastic[0], custom[0], others) == ("TeraPipeConfigError", "TeraPipeConfigError", [("", "")] * 2)
        assert f"load_checkpoint will be refused: {elastic[1]}" in told and "states that it saves of Adam" in elastic[1]
        assert "custom_load_fn" in custom[1]


LOST: list[tuple[str | None, int, str]] = [  # a file that is missing, the layers of the model, the error
    ("mp_rank_01_model_states.pt", 4, r"lacks mp_rank_01_model_states.pt: load a checkpoint that is whole"),
    (LAYER_2, 4, r"has no file of layer 2 \(DecoderLayer\): it was saved with fewer layers, or is not whole"),
    (None, 6, r"has no file of layer 6 \(\w+\): it was saved with fewer layers"),
    (None, 2, r"has files of 6 layers, and this model has 5. Build the model that was saved"),
]


def job_lost(precision: str, system: str, folder: str, losses: list[tuple[str | None, int]]) -> list[Any]:
    """Return the errors of loads of a checkpoint without its list, and of a step after each."""
    with Chain((), precision).engine(system) as engine:
        engines.train(engine, engines.batches(1))
        engine.save_checkpoint(folder, tag="tag")
    told = list[Any]()
    for number, (name, num_layers) in enumerate(losses):
        if torch.distributed.get_rank() == 0:
            copied = shutil.copytree(f"{folder}/tag", f"{folder}/{number}")
            for each in filter(None, (MANIFEST, name)):
                Path(copied, each).unlink()
        torch.distributed.barrier()
        with Chain((), precision, num_layers=num_layers).engine(system) as engine:
            load = functools.partial(engine.load_checkpoint, folder, tag=str(number))
            told.append((engines.raised_by(load), engines.step_error(engine)))
    return told


@pytest.mark.parametrize(
    ("precision", "system"), [("fp32", "seq1f1b"), ("fp32_zero1", "interleaved"), full("fp32", "chimera")]
)
def test_what_deepspeed_would_miss_is_refused_before_anything_changes(
    precision: str, system: str, tmp_path: Path
) -> None:
    """DeepSpeed fails in assertions, most without a text, or on keys, when some layers are loaded already."""
    states = [("zero_pp_rank_0_mp_rank_01_optim_states.pt", 4, "lacks zero_pp_rank_0_mp_rank_01_optim_states.pt")]
    cases = [*LOST, *(states if "zero" in precision else [])]
    job = {"precision": precision, "system": system, "losses": [case[:2] for case in cases]}
    first, second = rank_pool(2).run(job_lost, folder=str(tmp_path), **job)
    assert first == second
    for (error, step), (*_, wanted) in zip(first, cases, strict=True):
        assert error[0] == "TeraPipeConfigError" and re.search(wanted, error[1]), error
        assert step == ("", "")


def job_client_states(folder: str) -> list[Any]:
    """Return the errors of saves with values under DeepSpeed's names, and then the values of one that goes well."""
    with Chain((), "fp32").engine("seq1f1b") as engine:
        engines.train(engine, engines.batches(1))
        engine.save_checkpoint(folder, client_state={"epoch": 1})
        _, loaded = engine.load_checkpoint(folder)
        engines.train(engine, engines.batches(1))
        states = *({name: {"a": 1}} for name in OF_DEEPSPEED), {"global_steps": 7}, loaded
        told = [
            engines.raised_by(lambda state=state: engine.save_checkpoint(folder, client_state=state))
            for state in states
        ]
        engine.save_checkpoint(folder, client_state={"global_steps": engine.global_steps, "epoch": 2})
        path, loaded = engine.load_checkpoint(folder)
        whole = engines.raised_by(lambda: engine.save_16bit_model(folder))
        return [told, whole, Path(path).parent.name, loaded["epoch"], engine.global_steps]


OF_DEEPSPEED = "module", "optimizer", "lr_scheduler", "data_sampler", "random_ltd"


def test_a_client_state_takes_no_place_of_deepspeeds_states(tmp_path: Path) -> None:
    """With it DeepSpeed saves what no load can read, or loses the values."""
    for told, whole, *loaded in rank_pool(2).run(job_client_states, folder=str(tmp_path)):
        assert whole[0] == "NotImplementedError" and "save_16bit_model: no rank of a pipeline has the whole" in whole[1]
        names = *OF_DEEPSPEED, "global_steps", "global_samples, .*optimizer|optimizer, .*global_samples"
        for error, name in zip(told, names, strict=True):
            assert error[0] == "CheckpointError" and re.search(f"client_state has .*({name}).* other names", error[1])
        assert loaded == ["global_step2", 2, 2]


FIRST_RUNS: list[dict[str, Any]] = [
    {"bf16": {"enabled": True}}, {"zero_optimization": {"stage": 1, "elastic_checkpoint": True}},
    {**engines.ZERO1, "checkpoint": {"load_universal": True}},
]  # fmt: skip


def job_first_run(folder: str) -> list[Any]:
    """Return the results of loads from an empty folder, which scripts make in each start, and the errors of a step."""
    found = list[Any]()
    for changes in FIRST_RUNS:
        with Chain((), "fp32").engine("seq1f1b", **changes) as engine:
            error = engines.raised_by(lambda: found.append(engine.load_checkpoint(folder)))
            found.append((error, engines.step_error(engine)))
    return found


def test_a_folder_without_a_checkpoint_leaves_the_engine_as_it_is(tmp_path: Path) -> None:
    for *others, (error, step) in rank_pool(2).run(job_first_run, folder=str(tmp_path)):
        assert others == [(None, None), (("", ""), ("", ""))] * 2
        assert error[0] == "ValueError" and "latest_universal does not exist" in error[1]  # DeepSpeed's own
        assert step == ("", "")


def job_without_room(folder: str) -> tuple[str, str]:
    """Return the error of a load into another layout, in which the last rank has no memory for the moving states."""
    with Chain((), "fp32").engine("seq1f1b") as engine:
        engines.train(engine, engines.batches(1))
        engine.save_checkpoint(folder)
    with Chain((), "fp32").engine("interleaved") as engine, contextlib.ExitStack() as stack:
        if engine.global_rank == 1:
            stack.enter_context(mock.patch.object(Shard, "take", side_effect=RuntimeError("no room for the states")))
        return engines.raised_by(lambda: engine.load_checkpoint(folder))


def test_every_rank_raises_what_one_cannot_move(tmp_path: Path) -> None:
    for error in rank_pool(2).run(job_without_room, folder=str(tmp_path)):
        assert error == ("RuntimeError", "no room for the states")


def job_8_bits(system: str, folder: str) -> list[float]:
    """Return the losses after a save, and after its load in another engine."""
    bitsandbytes, losses = pytest.importorskip("bitsandbytes"), list[float]()
    data, chosen = engines.batches(4), {"optimizer": lambda listed: bitsandbytes.optim.AdamW8bit(listed, lr=1e-2)}
    for is_later in (False, True):
        with Chain((), "fp32_zero1").engine(system, zero_allow_untested_optimizer=True, initialize=chosen) as engine:
            if is_later:
                engine.load_checkpoint(folder)
            else:
                engines.train(engine, data[:2])
                engine.save_checkpoint(folder)
            losses += engines.train(engine, data[2:]).returned
    return losses


@pytest.mark.parametrize("system", ["seq1f1b", "zbv"])
def test_states_of_bitsandbytes_are_resumed(system: str, tmp_path: Path) -> None:
    """In zbv each parameter got the states of all. In seq1f1b the copies of the tied weight differed before the save:
    blocks of 8 bits lie elsewhere on another stage.
    """
    for losses in rank_pool(2).run(job_8_bits, system=system, folder=str(tmp_path)):
        assert losses[:2] == losses[2:]


def job_scale(saver: str, loader: str, folder: str) -> list[float]:
    """Return the loss scales before and after a load, and after three more steps."""
    with Chain((), saver).engine("seq1f1b") as engine:
        engines.train(engine, engines.batches(1))
        engine.save_checkpoint(folder)
    with Chain((), loader).engine("seq1f1b") as engine:
        scales = [float(engine.optimizer.loss_scale)]
        engine.load_checkpoint(folder)
        scales.append(float(engine.optimizer.loss_scale))
        engines.train(engine, engines.batches(3))
        return [*scales, float(engine.optimizer.loss_scale)]


@pytest.mark.parametrize(
    ("saver", "loader", "scales"),
    [("fp32_zero1", "fp16_zero1", [64.0, 64.0, 128.0]), full("fp16_zero1", "fp32_zero1", [1.0, 1.0, 1.0])],
)
def test_the_loss_scale_of_another_precision_stays_there(
    saver: str, loader: str, scales: list[float], tmp_path: Path
) -> None:
    for found in rank_pool(2).run(job_scale, saver=saver, loader=loader, folder=str(tmp_path)):
        assert found == scales


def _form(precision: str) -> str:
    return f"{precision[:4]} with ZeRO stage {int('zero1' in precision)}"


def job_reordered(systems: tuple[str, ...], folder: str) -> dict[str, Tensor]:
    """Return the parameters after a step of each engine; all but the first go on from the checkpoint before."""
    reordered = {"stage": 1, "round_robin_gradients": True}
    for turn, system in enumerate(systems):
        with Chain((), "fp32", stages=1).engine(system, zero_optimization=reordered) as engine:
            if turn:
                engine.load_checkpoint(folder)
            engine.train_batch(iter(engines.batches(1, first_seed=100 * turn)[0]))
            engine.save_checkpoint(folder)
            values = {name: each.detach().clone() for name, each in engine.module.named_parameters()}
    return values


def test_states_that_zero_deals_out_to_replicas(tmp_path: Path) -> None:
    ours = rank_pool(2).run(job_reordered, systems=("stock", "seq1f1b", "terapipe"), folder=str(tmp_path / "ours"))
    stock = rank_pool(2).run(job_reordered, systems=("stock",) * 3, folder=str(tmp_path / "stock"))
    assert engines.error_of(ours, stock) <= 1e-5


@pytest.mark.parametrize(
    ("system", "precision"),
    [("interleaved", "bf16_zero1"), *map(full, ("seq1f1b", "chimera", "chimera"), ("fp32", "fp32_zero1", "fp64"))],
)
def test_the_same_layout_goes_on_bit_by_bit(system: str, precision: str, tmp_path: Path) -> None:
    chain = Chain((system, system), precision)
    turns = run_chain(chain, tmp_path)
    alone = rank_pool(2).run(job_alone, chain=chain, system=system, turns=2)
    for rank, before in zip(turns[1], alone, strict=True):
        assert rank["losses"] == before["losses"][1]
        assert engines.error_of(rank["saved"], before["saved"]) == 0.0


# -- universal checkpoints -------------------------------------------------------------------------------------


def job_universal(writer: str, reader: str, folder: str) -> dict[str, Any]:
    chain = Chain((), "fp32_zero1")
    with chain.engine(writer) as engine:
        engines.train(engine, engines.batches(STEPS))
        engine.save_checkpoint(folder, tag="tag")
        if writer != "stock":
            as_older_versions(folder)
        saved = states_of(engine)
    convert(folder, "tag", inject_missing_state=True)
    with chain.engine(reader, checkpoint={"load_universal": True}) as engine:
        engines.train(engine, engines.batches(1, first_seed=400))
        engine.load_checkpoint(folder)
        found = {"saved": saved, "loaded": states_of(engine)}
        if reader == "stock":  # it has no way back
            return found | {"again": found["loaded"]}
        engine.save_checkpoint(f"{folder}/next")  # an ordinary one, which the same config loads
        engines.train(engine, engines.batches(1))
        engine.load_checkpoint(f"{folder}/next")
        return found | {"again": states_of(engine)}


@pytest.mark.parametrize(
    ("writer", "reader"), [("chimera", "interleaved"), full("stock", "chimera"), full("interleaved", "stock")]
)
def test_the_converter_takes_them_as_deepspeeds_own(writer: str, reader: str, tmp_path: Path) -> None:
    ranks = rank_pool(2).run(job_universal, writer=writer, reader=reader, folder=str(tmp_path))
    saved, *loaded = (by_name([rank[when] for rank in ranks]) for when in ("saved", "loaded", "again"))
    assert all(engines.error_of(states, saved) == 0.0 for states in loaded)


def job_other_kind(folder: str) -> list[Any]:
    """Return the errors of loads of the kind that the config does not ask for, and the log of one that goes back."""
    chain, found = Chain((), "fp32_zero1"), list[Any]()
    with chain.engine("seq1f1b") as engine:
        engines.train(engine, engines.batches(1))
        engine.save_checkpoint(folder, tag="tag")
        convert(folder, "tag", inject_missing_state=True)
        found.append(engines.raised_by(lambda: engine.load_checkpoint(folder, tag="tag_universal")))
        found.append(engines.step_error(engine))
    with chain.engine("seq1f1b", checkpoint={"load_universal": True}) as engine:
        found.append(engines.raised_by(lambda: engine.load_checkpoint(folder, tag="tag")))
        for steps in (0, 1):
            engines.train(engine, engines.batches(steps))
            if steps:
                engine.save_checkpoint(folder)
            with engines.logged() as log:
                engine.load_checkpoint(folder)
                engine.load_checkpoint(folder, load_module_only=True)
            found.append([line for line in log if "went back" in line])
    return found


def test_the_kind_of_a_checkpoint_is_told_and_so_is_a_way_back(tmp_path: Path) -> None:
    ranks = rank_pool(2).run(job_other_kind, folder=str(tmp_path))
    for rank, (ordinary, step, universal, *told) in enumerate(ranks):
        assert "tag_universal is a universal checkpoint: set" in ordinary[1] and step == ("", "")
        assert "/tag is no universal checkpoint: name one that is, or set" in universal[1]
        assert told[0] == [] and [("back to step 1, of" in line) for line in told[1]] == [True] * (rank == 0), told


def job_universal_replicas(folder: str) -> dict[str, Any]:
    """Read what two stages wrote into stages whose first has an empty group; then again, without one of the folders."""
    saved, loaded = Grouped("seq1f1b", "fp32_zero1"), Grouped("seq1f1b", "fp32_zero1", first_layers=1)
    with saved.engine() as engine:
        engines.train(engine, engines.batches(STEPS))
        engine.save_checkpoint(folder, tag="tag")
        found: dict[str, Any] = {"saved": states_of(engine)}
    convert(folder, "tag", inject_missing_state=True)
    with loaded.engine(checkpoint={"load_universal": True}) as engine:
        engines.train(engine, engines.batches(1, first_seed=400))
        engine.load_checkpoint(folder)
        found["loaded"] = states_of(engine)
        torch.distributed.barrier()
        if engine.global_rank == 0:
            shutil.rmtree(f"{folder}/tag_universal/zero/4.feed_forward.down.weight")
        torch.distributed.barrier()
        return found | {"error": ": ".join(engines.raised_by(lambda: engine.load_checkpoint(folder)))}


def test_replicas_without_a_part_of_a_group_load_universal_checkpoints(tmp_path: Path) -> None:
    """DeepSpeed raises an IndexError there, and gathers parameters while one of the ranks raises."""
    ranks = rank_pool(4).run(job_universal_replicas, folder=str(tmp_path))
    assert engines.error_of(*(by_name([rank[when] for rank in ranks]) for when in ("loaded", "saved"))) == 0.0
    assert all("4.feed_forward.down" in rank["error"] for rank in ranks), [rank["error"] for rank in ranks]


class ScaledLoss(torch.nn.Module):
    """Scale logits by a trained parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor([1.3]))

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return gpt_loss(logits * self.scale, labels)


def job_universal_loss(folder: str) -> list[Any]:
    """Return the states of a loss module, as the last stage saves and as it loads them."""
    chain, found, convert_all = Chain((), "fp32_zero1"), list[Any](), ds_to_universal._do_parallel_work
    with chain.engine("seq1f1b", loss_fn=ScaledLoss()) as engine:
        engines.train(engine, engines.batches(STEPS))
        engine.save_checkpoint(folder, tag="tag")
        found.append(states_of(engine)["loss_fn.scale"])
    # the converter's workers may write the file of a parameter in any order
    backwards = lambda work, items, workers: convert_all(work, list(items)[::-1], workers)  # noqa: E731
    with mock.patch.object(ds_to_universal, "_do_parallel_work", backwards):
        convert(folder, "tag", inject_missing_state=True)
    with chain.engine("seq1f1b", loss_fn=ScaledLoss(), checkpoint={"load_universal": True}) as engine:
        engine.load_checkpoint(folder)
        return [*found, states_of(engine)["loss_fn.scale"]]


def test_the_converter_takes_a_loss_module_from_the_stage_that_trains_it(tmp_path: Path) -> None:
    saved, loaded = rank_pool(2).run(job_universal_loss, folder=str(tmp_path))[1]
    assert engines.error_of(loaded, saved) == 0.0 and saved["exp_avg"].abs() > 0


def job_loss_of_sequence_ranks(folder: str, sizes: list[list[int]]) -> list[list[float]]:
    """Return a parameter of a loss module, as each engine has loaded it from the one before and as it trains it."""
    found = []
    for turn, dims in enumerate(sizes):
        module = {"topology": ProcessTopology(axes=["pipe", "data", "sequence"], dims=dims)}
        options = {"stages": None, "module": module, "loss_fn": ScaledLoss()}
        with engines.engine_of(engines.fp32_layers(), engines.unchecked(slices=[8, 8, 6]), **options) as engine:
            if turn:
                engine.load_checkpoint(folder, load_module_only=True)
            loaded = engine.module.loss_fn.scale.item()
            engines.train(engine, engines.batches(1, length=22))
            engine.save_checkpoint(folder)
            found.append([loaded, engine.module.loss_fn.scale.item()])
    return found


def test_a_loss_module_moves_between_sequence_ranks_and_stages(tmp_path: Path) -> None:
    job = {"folder": str(tmp_path), "sizes": [[1, 1, 2], [2, 1, 1], [1, 1, 2]]}
    (_, first), (second, third), (fourth, _) = rank_pool(2).run(job_loss_of_sequence_ranks, **job)[1]
    assert first == second != third == fourth


def job_universal_in_part(folder: str) -> list[str]:
    """Return the errors of engines whose optimizers differ from the saved ones, and the log of a load that succeeds."""
    chain, told = Chain((), "fp32_zero1"), list[str]()
    for tag, writer in (("two", Grouped("seq1f1b", "fp32_zero1").engine()), ("one", chain.engine("seq1f1b"))):
        with writer as engine:
            engines.train(engine, engines.batches(1))
            engine.save_checkpoint(folder, tag=tag)
        convert(folder, tag, inject_missing_state=True)
    for tag, further in (("two", {}), ("one", {}), ("one", {"amsgrad": True})):
        optimizer = {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True, **further}}
        with chain.engine("seq1f1b", checkpoint={"load_universal": True}, optimizer=optimizer) as engine:
            next(each for each in engine.module.parameters() if each.dim() == 1).requires_grad_(False)
            load = functools.partial(engine.load_checkpoint, folder, tag=f"{tag}_universal")
            with engines.logged() as log:
                told.append(": ".join(engines.raised_by(load)) + " ".join(log))
    return told


def test_universal_checkpoints_that_would_be_loaded_in_part_are_refused(tmp_path: Path) -> None:
    """DeepSpeed passes over the weights of further groups, and over states that its converter leaves out."""
    (groups, frozen, states), second = rank_pool(2).run(job_universal_in_part, folder=str(tmp_path))
    assert "has 2 groups of parameters, and this one has 1" in groups and second == [groups, ": ", states]
    assert "neither frozen parameters nor buffers: 1.attention_norm.weight, " in frozen
    assert "universal checkpoints lack max_exp_avg_sq of Adam" in states


def job_own_settings(precision: str, folder: str) -> list[Any]:
    """Return for loads of both forms, with and without states, the errors of parameters and moments, and the settings.

    The moments of an engine are compared with its own where it does not load any.
    """
    chain, found = Chain((), precision), list[Any]()
    with chain.engine("seq1f1b", gradient_clipping=0.7) as engine:
        engines.train(engine, engines.batches(STEPS))
        engine.save_checkpoint(folder, tag="tag")
        saved = states_of(engine)
    convert(folder, "tag", inject_missing_state=True)
    optimizer = {"type": "Adam", "params": {"lr": 0.03, "torch_adam": True}}
    for is_universal, options in itertools.product((False, True), ({}, {"load_module_only": True}, ALONE)):
        changes = {"checkpoint": {"load_universal": is_universal}, "gradient_clipping": 0.1, "optimizer": optimizer}
        with chain.engine("seq1f1b", **changes) as engine:
            engines.train(engine, engines.batches(1, first_seed=400))
            wanted = states_of(engine) if options else saved
            engine.load_checkpoint(folder, tag="tag_universal" if is_universal else "tag", **options)
            now = states_of(engine)
            kinds = (("value", saved), ("exp_avg", wanted), ("exp_avg_sq", wanted))
            errors = [max(engines.error_of(now[n][kind], like[n][kind]) for n in now) for kind, like in kinds]
            step = engines.raised_by(lambda engine=engine: engines.train(engine, engines.batches(1)))  # reads gradients
            found.append([errors, engine.get_lr(), engine.optimizer.clip_grad, step])
    return found


ALONE = {"load_optimizer_states": False}


@pytest.mark.parametrize("precision", ["bf16_zero1_fp32_sums", full("fp32_zero1"), full("fp16_zero1")])
def test_a_load_keeps_what_the_config_says_and_the_caller_leaves_out(precision: str, tmp_path: Path) -> None:
    """DeepSpeed takes the clipping of the checkpoint, and of a universal one all states, whatever the caller says."""
    for whole, *alone in rank_pool(2).run(job_own_settings, precision=precision, folder=str(tmp_path)):
        for index, found in enumerate([whole, *alone]):
            assert found == [[0.0] * 3, [0.03 if index % 3 else engines.LEARNING_RATE], 0.1, ("", "")], index


def job_after_a_failed_load(folder: str) -> tuple[str, float, tuple[str, str]]:
    """Return the error of a load that fails on the last rank alone, then the limit after one that succeeds, a step."""
    chain = Chain((), "fp32_zero1")
    with chain.engine("seq1f1b", gradient_clipping=0.7) as engine:
        engines.train(engine, engines.batches(1))
        engine.save_checkpoint(folder)
    with chain.engine("seq1f1b", gradient_clipping=0.1) as engine:
        fails = mock.patch.object(engine.optimizer, "load_state_dict", side_effect=MemoryError)
        with fails if engine.global_rank else contextlib.nullcontext():
            failed = engines.raised_by(lambda: engine.load_checkpoint(folder))
        engine.load_checkpoint(folder)
        return failed[0], engine.optimizer.clip_grad, engines.step_error(engine)


def test_a_failed_load_leaves_the_clipping_of_the_config(tmp_path: Path) -> None:
    found = rank_pool(2).run(job_after_a_failed_load, folder=str(tmp_path))
    assert all(failed for failed, *_ in found) and [rest for _, *rest in found] == [[0.1, ("", "")]] * 2


# -- groups of parameters, and what is refused -----------------------------------------------------------------


@dataclass(frozen=True)
class Grouped:
    """Build an engine whose optimizer has two groups, matrices with weight decay and vectors without."""

    system: str
    precision: str = "fp64"
    backwards: bool = False  # each group in the other order than the module has
    method: str = "uniform"
    first_layers: int | None = None  # of the first stage; with one, the embedding, it has no vectors

    def __str__(self) -> str:
        layers = [] if self.first_layers is None else [str(self.first_layers)]
        return "-".join([self.system, self.precision, self.method, *layers, *["backwards"] * self.backwards])

    def engine(self, **further: Any) -> contextlib.AbstractContextManager[PipelineEngine]:
        dtype = "float64" if self.precision == "fp64" else "float32"
        layers = engines.gpt_layers(dtype)
        model = engines.pipeline_module(layers, partition_method=self.method)
        changes, terapipe = PRECISIONS[self.precision] | further, SYSTEMS[self.system]
        if terapipe is not None:
            terapipe |= {} if self.first_layers is None else {"partition": [0, self.first_layers, len(layers)]}
            terapipe_ds.lay_out(model, engines.config(terapipe=terapipe, **changes))
        return engines.started(model, terapipe, initialize={"model_parameters": self.groups(model)}, **changes)

    def groups(self, model: PipelineModule) -> list[dict[str, Any]]:
        parameters = list(model.parameters())[:: -1 if self.backwards else 1]
        return [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
        ]


def job_save(grouped: Grouped, folder: str) -> dict[str, dict[str, Tensor]]:
    return _with(
        grouped, lambda engine: (engines.train(engine, engines.batches(STEPS)), engine.save_checkpoint(folder))
    )


def job_load(grouped: Grouped, folder: str, alone_too: bool) -> dict[str, Any]:
    """Return the states before a load, after it or its error, and after a load of parameters alone."""
    found: dict[str, Any] = {}

    def load(engine: PipelineEngine) -> None:
        engines.train(engine, engines.batches(1, first_seed=400))
        found["before"] = states_of(engine)
        found["error"] = ": ".join(filter(None, engines.raised_by(lambda: engine.load_checkpoint(folder))))
        found["states"] = states_of(engine)
        if alone_too:
            engine.load_checkpoint(folder, load_module_only=True)
        else:
            found["loss"] = engines.train(engine, engines.batches(1)).returned
        found["decays"] = [group["weight_decay"] for group in engine.optimizer.param_groups]

    found["alone"] = _with(grouped, load)
    return found


def _with(grouped: Grouped, act: Any) -> dict[str, dict[str, Tensor]]:
    with grouped.engine() as engine:
        act(engine)
        return states_of(engine)


def saved_and_loaded(saver: Grouped, loader: Grouped, folder: Path, alone_too: bool = False) -> tuple[Any, Any]:
    pool = rank_pool(2)
    saved = pool.run(job_save, grouped=saver, folder=str(folder))
    return saved, pool.run(job_load, grouped=loader, folder=str(folder), alone_too=alone_too)


@pytest.mark.parametrize(
    ("saver", "loader"),
    [
        (Grouped("interleaved"), Grouped("seq1f1b", method="parameters")),
        (Grouped("chimera", "fp32_zero1"), Grouped("stock", "fp32_zero1")),
        (Grouped("interleaved", "fp32_zero1", backwards=True), Grouped("chimera", "fp32_zero1")),
        full(Grouped("stock", "fp32_zero1"), Grouped("interleaved", "fp32_zero1", method="parameters")),
        full(Grouped("interleaved"), Grouped("chimera", backwards=True)),
        (Grouped("stock", "fp32_zero1"), Grouped("seq1f1b", "fp32_zero1", first_layers=1)),
        (Grouped("seq1f1b", first_layers=1), Grouped("stock")),
        full(Grouped("seq1f1b", "fp16", first_layers=1), Grouped("seq1f1b", "fp16", first_layers=3)),
        full(Grouped("stock", "bf16_zero1"), Grouped("seq1f1b", "bf16_zero1", first_layers=1)),
        full(Grouped("seq1f1b", "fp16_zero1", first_layers=1), Grouped("stock", "fp16_zero1")),
        full(Grouped("stock"), Grouped("seq1f1b", first_layers=1)),
    ],
    ids=str,
)
def test_groups_of_parameters(saver: Grouped, loader: Grouped, tmp_path: Path) -> None:
    saved, loaded = saved_and_loaded(saver, loader, tmp_path)
    assert [rank["error"] for rank in loaded] == ["", ""] and math.isfinite(loaded[0]["loss"][0])
    assert loaded[0]["decays"] == [0.1, 0.0]
    assert engines.error_of(by_name([rank["states"] for rank in loaded]), by_name(saved)) == 0.0
    assert engines.error_of(by_name([rank["before"] for rank in loaded]), by_name(saved)) > 0.0


REFUSED = [
    (Grouped("stock"), Grouped("interleaved", backwards=True), "not in the order of module.*own engine"),
    (Grouped("stock"), Grouped("interleaved", method="type:DecoderLayer"), "not those of the layers.*partition_method"),
]


@pytest.mark.parametrize(("saver", "loader", "reason"), REFUSED, ids=str)
def test_what_cannot_be_brought_there_is_refused_before_anything_is_loaded(
    saver: Grouped, loader: Grouped, reason: str, tmp_path: Path
) -> None:
    saved, loaded = saved_and_loaded(saver, loader, tmp_path, alone_too=True)
    for rank in loaded:
        assert rank["error"].startswith("TeraPipeConfigError")
        assert re.search(reason, rank["error"]), rank["error"]
        assert "load_module_only=True" in rank["error"]
        assert engines.error_of(rank["states"], rank["before"]) == 0.0
    values, before, now = by_name(saved), *(by_name([rank[when] for rank in loaded]) for when in ("before", "alone"))
    for name, state in now.items():  # parameters alone may go anywhere
        assert engines.error_of(state["value"], values[name]["value"]) == 0.0
        assert engines.error_of(state["exp_avg"], before[name]["exp_avg"]) == 0.0


@pytest.mark.parametrize("precision", ["fp64", full("fp32_zero1")])
def test_deepspeeds_own_engine_cannot_mistake_what_stands_in_another_order(precision: str, tmp_path: Path) -> None:
    saver, loader = (Grouped(system, precision, backwards=True) for system in ("interleaved", "stock"))
    _, loaded = saved_and_loaded(saver, loader, tmp_path)
    assert all(rank["error"].startswith(("KeyError", "AssertionError")) for rank in loaded)


# -- frozen layers ---------------------------------------------------------------------------------------------


class Frozen(PipelineModule):
    """Freeze one layer, and of another one only the norms."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not (name.startswith("2.") or ("norm" in name and name.startswith("3."))))


def job_frozen(system: str, folder: str, load: bool) -> dict[str, Any]:
    with engines.engine_of(engines.gpt_layers(), SYSTEMS[system], module_class=Frozen) as engine:
        engines.train(engine, engines.batches(1, first_seed=400 * load))
        if load:
            engine.load_checkpoint(folder, load_module_strict=False)
        else:
            engine.save_checkpoint(folder, exclude_frozen_parameters=True)
        frozen = sorted(name for name, p in engine.module.named_parameters() if not p.requires_grad)
        return {"states": states_of(engine), "frozen": frozen}


@pytest.mark.parametrize(("saver", "loader"), [("interleaved", "chimera"), full("chimera", "stock")])
def test_frozen_parameters_may_be_left_out(saver: str, loader: str, tmp_path: Path) -> None:
    pool = rank_pool(2)
    saved = pool.run(job_frozen, system=saver, folder=str(tmp_path), load=False)
    loaded = pool.run(job_frozen, system=loader, folder=str(tmp_path), load=True)
    assert engines.error_of(*(by_name([rank["states"] for rank in ranks]) for ranks in (loaded, saved))) == 0.0
    frozen = [{name for rank in ranks for name in rank["frozen"]} for ranks in (saved, loaded)]
    assert frozen[0] == frozen[1] != set()
    assert not torch.load(tmp_path / "global_step1" / LAYER_2)


# -- files -----------------------------------------------------------------------------------------------------


def job_write(chain: Chain, folder: str) -> None:
    with chain.engine(*chain.systems) as engine:
        engines.train(engine, engines.batches(1))
        engine.eval_batch(iter(engines.batches(1)[0]))
        engine.save_checkpoint(folder, tag="tag")


def tensors_in(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of a loaded file, with their places."""
    if torch.is_tensor(value):
        yield path, value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from tensors_in(each, f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        for index, each in enumerate(value):
            yield from tensors_in(each, f"{path}/{index}")
    elif hasattr(value, "__dict__"):
        yield from tensors_in(vars(value), path)


def contents(folder: Path) -> dict[str, dict[str, tuple[tuple[int, ...], str]]]:
    """Map file -> place -> (shape, dtype) of every saved tensor."""
    files = sorted(folder.rglob("*.pt"))
    return {
        file.name: {
            place: (tuple(tensor.shape), str(tensor.dtype))
            for place, tensor in tensors_in(torch.load(file, map_location="cpu", weights_only=False))
        }
        for file in files
    }


@pytest.mark.parametrize("precision", ["fp64", "bf16_zero1"])
def test_a_checkpoint_has_what_the_stock_engine_saves_and_nothing_else(precision: str, tmp_path: Path) -> None:
    saved = {}
    for name in ("stock", "terapipe"):
        rank_pool(2).run(job_write, chain=Chain((name,), precision, tied=False), folder=str(tmp_path / name))
        saved[name] = contents(tmp_path / name)
    assert saved["terapipe"] == saved["stock"]
    layers = {file: tensors for file, tensors in saved["terapipe"].items() if file.startswith("layer_")}
    assert len(layers) == 7
    names = {place for tensors in layers.values() for place in tensors}
    assert {re.sub(r"attention_norm|feed_forward_norm", "norm", name) for name in names} == {
        "/weight", "/norm.weight", "/attention.qkv.weight", "/attention.out.weight", "/feed_forward.up.weight",
        "/feed_forward.down.weight", "/out.weight",
    }  # fmt: skip
