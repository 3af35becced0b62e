"""Test that models of transformers train over stages and tensor-parallel ranks as their own classes do alone."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft", reason="needs the extra hf: pip install terapipe_ds[hf]")

import contextlib
import math
from unittest import mock

import torch
import torch.distributed as torch_dist
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.apertus.modeling_apertus import ApertusMLP

import terapipe_ds
from terapipe_ds.models.gpt import gpt_loss
from terapipe_ds.models.hugging_face.layers import Piece
from terapipe_ds.models.hugging_face.tensor_parallel import divide
from terapipe_ds.models.hugging_face.tensor_parallel.layers import gathered_copy, share_of
from terapipe_ds.runtime.layers.weight_gradients import WeightGradients
from terapipe_ds.strategy import Strategy
from tests.conftest import FULL
from tests.distributed import engines
from tests.distributed.cases import relative_error
from tests.distributed.checkpoint_states import convert
from tests.distributed.harness import rank_pool
from tests.distributed.hugging_face_files import write_model
from tests.distributed.hugging_face_jobs import batches, differences, engine_of, train_whole, tuples
from tests.distributed.nccl_emulator import emulated_nccl
from tests.distributed.test_strategy_runs import strategy_of
from tests.hugging_face_families import VOCAB_SIZE, config_of
from tests.unit.models.hugging_face.sliced_model import in_fp64, loss_of, whole_model

Grid = tuple[int, int, int]
"""Stages, data-parallel and tensor-parallel ranks."""
SECTION = engines.section(slices=[7, 3, 6], verify="off")
BF16 = {"bf16": {"enabled": True}, **engines.ZERO1, "data_types": {"grad_accum_dtype": "fp32"}}


def loss_of_logits(logits: Tensor, labels: Tensor) -> Tensor:
    return gpt_loss(logits, labels)


def topology(grid: Grid) -> PipeModelDataParallelTopology:
    return PipeModelDataParallelTopology(num_pp=grid[0], num_dp=grid[1], num_mp=grid[2])


def whole_weights(module: Any) -> dict[str, Tensor]:
    """Return the whole weights of all stages by their names in the model of transformers. A collective."""
    here = {
        f"{name}.{key}": p.detach().clone()
        for piece in module.modules()
        if isinstance(piece, Piece)
        for name, held in zip(piece.names, piece.held, strict=True)
        for key, p in gathered_copy(held).named_parameters()
    }
    everyone: list[Any] = [None] * torch_dist.get_world_size()
    torch_dist.all_gather_object(everyone, here)
    return {name: weight for stage in everyone for name, weight in stage.items()}


def changed_config(family: str, fields: dict[str, Any] | None) -> Any:
    config = config_of(family)
    for name, value in (fields or {}).items():
        setattr(config, name, value)
    return config


def compared(run: engines.Run, module: Any, trained: tuple[Any, Any, Any]) -> dict[str, float]:
    """Return the largest errors on this rank against the whole model, cut as this rank holds it."""
    losses, gradients, after = trained
    names, parameters = module.checkpoint_names(), dict(module.named_parameters())
    held = {key: parameters[name] for name, key in names.items()}

    def shares(tensors: Any) -> dict[str, Tensor]:
        own = {key.removeprefix("base_model.model."): value.detach() for key, value in tensors.items()}
        return {key: share_of(held[key], value) if key in held else value for key, value in own.items()}

    return differences(run, names, losses, list(map(shares, gradients)), shares(after))


def train_divided(
    family: str,
    grid: Grid,
    fields: dict[str, Any] | None = None,
    clipping: float = 0.0,
    is_bf16: bool = False,
    is_fp32: bool = False,
    all_logits: bool = False,
    zeros: tuple[str, ...] = (),
    **section: Any,
) -> dict[str, float]:
    """Return the largest errors on this rank against the model's own class in this process; of the losses in bf16.

    Weights whose names have one of `zeros` begin as 0. `kept`: how many products of linear layers were left to W.
    """
    dtype, kept = torch.float32 if is_bf16 or is_fp32 else torch.float64, list[Any]()
    with contextlib.nullcontext() if is_bf16 or is_fp32 else in_fp64():
        config = changed_config(family, fields)
        options: dict[str, Any] = {"loss_fn": loss_of_logits if all_logits else None, "topology": topology(grid)}
        if zeros:
            torch.manual_seed(5)  # each rank makes the whole model
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
            with torch.no_grad():
                [p.zero_() for name, p in model.named_parameters() if any(each in name for each in zeros)]
            module = terapipe_ds.from_pretrained(model, **options)
        else:
            module = terapipe_ds.from_config(config, dtype=dtype, **options)
        whole, data = whole_model(config, whole_weights(module), dtype), batches(config.get_text_config().vocab_size)
        changes = {"gradient_clipping": clipping, "tensor_parallel": {"autotp_size": grid[2]}}
        original = WeightGradients.keep

        def keep(self: Any, *args: Any, **named: Any) -> None:
            kept.append(args)
            original(self, *args, **named)

        with mock.patch.object(WeightGradients, "keep", keep):
            with engine_of(module, SECTION | section, **changes, **(BF16 if is_bf16 else {})) as engine:
                run = engines.train(engine, tuples(module, data))
        trained = train_whole(whole, data, clipping)
        if is_bf16:
            pairs = zip(run.returned, trained[0], strict=True)
            return {"loss": max(relative_error(a, b) for a, b in pairs)}
        return compared(run, module, trained) | {"kept": len(kept)}


def train_over_nccl(grid: Grid) -> None:
    with emulated_nccl(eager=True):
        module = terapipe_ds.from_config(config_of("llama"), topology=topology(grid), dtype=torch.float32)
        with engine_of(module, SECTION) as engine:
            engines.train(engine, tuples(module, batches(VOCAB_SIZE)))


@pytest.mark.parametrize("grid", [(2, 1, 1), pytest.param((1, 1, 2), marks=pytest.mark.full)], ids=str)
def test_no_collective_comes_before_a_device_is_chosen(grid: Grid) -> None:
    rank_pool(2).run(train_over_nccl, grid=grid)


def train_adapters(grid: Grid, folder: str, family: str = "llama", **adapter_fields: Any) -> list[dict[str, float]]:
    """Return the largest errors on this rank against peft; on rank 0 also those of what peft reads of the folders."""
    with in_fp64():
        config = config_of(family, 4)
        fields = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False, **adapter_fields}
        module = terapipe_ds.from_config(
            config, topology=topology(grid), dtype=torch.float64, adapter=LoraConfig(**fields)
        )
        base = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
        model = get_peft_model(base, LoraConfig(**fields)).train()
        base.load_state_dict(whole_weights(module), strict=False)
        data = batches(config.vocab_size)
        with engine_of(module, SECTION) as engine:
            run = engines.train(engine, tuples(module, data))
            terapipe_ds.save_pretrained(engine, f"{folder}/adapters")
            terapipe_ds.save_pretrained(engine, f"{folder}/merged", merge=True)
            after = whole_weights(module)
        errors = compared(run, module, train_whole(model, data))
        torch_dist.barrier()
        if torch_dist.get_rank() > 0:  # the first rank reads
            return [errors]
        fresh = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
        read = PeftModel.from_pretrained(fresh, f"{folder}/adapters").state_dict()
        trained = [name for name in after if ".lora_" in name or ".modules_to_save." in name]
        saved = max(float((read[f"base_model.model.{name}"] - after[name]).abs().max()) for name in trained)
        merged = AutoModelForCausalLM.from_pretrained(f"{folder}/merged", dtype=torch.float64)
        model.merge_adapter()
        tokens = data[0][0]["input_ids"]
        with torch.no_grad():
            ours, theirs = (each(tokens).logits for each in (merged, model))
        return [errors, {"saved": saved, "merged": float((ours - theirs).norm() / theirs.norm())}]


def through_folders(family: str, folder: str, grids: list[Grid]) -> dict[str, Any]:
    """Read a model of transformers, train it, and write it; the next grid reads that. Return findings on this rank."""
    write_model(family, f"{folder}/0", max_shard_size="50KB")
    found: dict[str, Any] = {"evaluation": 0.0}
    for index, grid in enumerate(grids):
        theirs = AutoModelForCausalLM.from_pretrained(f"{folder}/{index}")
        module = terapipe_ds.from_pretrained(f"{folder}/{index}", topology=topology(grid))
        data = batches(VOCAB_SIZE)
        with engine_of(module, SECTION) as engine:
            weights, state = whole_weights(module), theirs.state_dict()
            found[f"read {index}"] = all(torch.equal(value, state[name]) for name, value in weights.items())
            here = {key: module.get_parameter(name) for name, key in module.checkpoint_names().items()}
            found[f"largest share {index}"] = max(
                p.numel() / state[key].numel() for key, p in here.items() if p.dim() > 1
            )
            evaluated = float(engine.eval_batch(iter(tuples(module, data)[0])))
            logits = engine.eval_batch(iter(tuples(module, data)[0]), compute_loss=False, reduce_output=None)
            engines.train(engine, tuples(module, data[:1]))
            terapipe_ds.save_pretrained(engine, f"{folder}/{index + 1}")
        torch_dist.barrier()
        with torch.no_grad():
            expected = sum(float(loss_of(theirs.eval(), batch)) for batch in data[0]) / len(data[0])
            wanted = [theirs(batch["input_ids"]).logits for batch in data[0]]
        found["evaluation"] = max(found["evaluation"], relative_error(evaluated, expected))
        for ours, whole in zip(logits or (), wanted, strict=logits is not None):  # on the last stage
            found["evaluation"] = max(found["evaluation"], float((ours - whole).norm() / whole.norm()))
    return found


def write_checkpoint(family: str, grid: Grid, folder: str, **adapter_fields: Any) -> list[float]:
    """Make a step, write a checkpoint and convert it; return the losses of the steps that follow."""
    with _resumable(family, grid, adapter_fields) as engine:
        data = _own_batches(engine)
        engines.train(engine, data[:1])
        engine.save_checkpoint(folder, tag="one")
        losses = engines.train(engine, data).returned
    torch_dist.barrier()
    convert(folder, "one")
    return losses


def read_checkpoint(family: str, grid: Grid, folder: str, universal: bool, **adapter_fields: Any) -> list[float]:
    """Load a checkpoint after another step; return the losses of the steps that follow."""
    with _resumable(family, grid, adapter_fields, checkpoint={"load_universal": universal}) as engine:
        data = _own_batches(engine)
        engines.train(engine, data[1:])
        engine.load_checkpoint(folder, None if universal else "one")
        return engines.train(engine, data).returned


def _resumable(family: str, grid: Grid, adapter_fields: dict[str, Any], **changes: Any) -> Any:
    adapter = LoraConfig(r=4, init_lora_weights=False, **adapter_fields) if adapter_fields else None
    module = terapipe_ds.from_config(config_of(family), topology=topology(grid), adapter=adapter, dtype=torch.float32)
    return engine_of(module, SECTION, **engines.ZERO1, gradient_accumulation_steps=2 // grid[1], **changes)


def _own_batches(engine: Any) -> list[Any]:
    """Return two steps of two micro-batches, divided over the replicas."""
    place = slice(engine.grid.get_data_parallel_rank(), None, engine.grid.get_data_parallel_world_size())
    return [step[place] for step in tuples(engine.module, batches(VOCAB_SIZE))]


def by_strategy(family: str, strategy: str) -> tuple[dict[str, Any], list[float]]:
    """Train by the config of a strategy alone; return the config, and the losses beside the whole model's."""
    planned = Strategy.from_json(strategy)
    config, changes = config_of(family, 4), planned.to_deepspeed()
    module = terapipe_ds.from_config(config, topology=terapipe_ds.topology_of(planned), dtype=torch.float32)
    whole, data = whole_model(config, whole_weights(module), torch.float32), batches(VOCAB_SIZE)
    terapipe = {**changes.pop("terapipe"), "granularity_tokens": 1, "verify": "off"}
    with engine_of(module, terapipe, **{k: v for k, v in changes.items() if k != "optimizer"}) as engine:
        run = engines.train(engine, tuples(module, data))
    return changes, [relative_error(a, b) for a, b in zip(run.returned, train_whole(whole, data)[0], strict=True)]


def refusal(family: str, grid: Grid, fields: dict[str, Any], plan: dict[str, Any], step: bool, **changes: Any) -> Any:
    """Return the error of a model whose config and plan have other entries: None takes one out."""
    apart, is_used_twice = changes.pop("apart", False), changes.pop("is_used_twice", False)
    data, token = batches(VOCAB_SIZE), changes.pop("token", 0)
    forward, difference, is_alone = ApertusMLP.forward, divide.difference, changes.pop("is_alone", False)

    def differ_alone(*args: Any) -> Any:
        """Find a difference on one rank, which the others must learn of."""
        problem, *sketches = difference(*args)
        return "found by one rank" if torch_dist.get_rank() == 1 else problem, *sketches

    def use_twice(self: Any, hidden: Tensor) -> Tensor:
        """Use a parameter on the rank's share, and on what is whole."""
        return forward(self, hidden) + hidden * self.act_fn.alpha_p

    config = changed_config(family, fields)
    named = {**config.base_model_tp_plan, **plan} if plan else config.base_model_tp_plan
    if named is not None:
        config.base_model_tp_plan = {key: style for key, style in named.items() if style is not None}
    adapter = LoraConfig(r=4, target_modules=["q_proj"], **changes.pop("adapter")) if "adapter" in changes else None
    terapipe = changes.pop("terapipe", SECTION)

    def act() -> None:
        with (
            mock.patch.object(ApertusMLP, "forward", use_twice if is_used_twice else forward),
            mock.patch.object(divide, "difference", differ_alone if is_alone else difference),
        ):
            module = terapipe_ds.from_config(config, topology=topology(grid), adapter=adapter, dtype=torch.float32)
        with engine_of(module, terapipe, **changes) as engine:
            if step:
                if apart:  # as a layer that computes otherwise in training
                    weight = next(p for name, p in engine.module.named_parameters() if "layernorm" in name)
                    weight.register_hook(lambda gradient: gradient * (1 + torch_dist.get_rank()))
                data[0][0]["input_ids"][0, 3] = token
                engines.train(engine, tuples(module, data))

    return engines.raised_by(act)


FAMILIES = (
    "llama", "qwen3", "mistral", "gemma2", "gemma3_text", "granite", "olmo", "olmo2", "phi", "gpt_neox", "glm",
    "mixtral", "deepseek_v3", "qwen3_next",
)  # fmt: skip
BOTH = (2, 1, 2)
OLDER_PLAN = {
    f"layers.*.{name}": style
    for style, names in {
        "colwise": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"),
        "rowwise": ("self_attn.o_proj", "mlp.down_proj"),
    }.items()
    for name in names
}
VERIFIED = {"verify": "first_batch"}
ODD_AND_TIED = {"vocab_size": 67, "tie_word_embeddings": True}
CASES: dict[str, dict[str, Any]] = {
    # fewer key and value heads than ranks, and norms whose gradients the ranks sum, which plans of 4.57 do not name
    "shared heads": {"family": "qwen3", "grid": (1, 1, 4), "fields": {"base_model_tp_plan": OLDER_PLAN}},
    # tied embeddings: one rank has more of them than the other (gemma2 has a forward of its own for them: each has all)
    "odd vocabulary, clipping": {"family": "llama", "grid": BOTH, "fields": ODD_AND_TIED, "clipping": 0.01},
    # biases beside divided weights, which count once in the norm; DeepSpeed's norm is fp32
    "biases, clipping": {"family": "phi", "grid": BOTH, "clipping": 0.01},
    "zero bubble": {"family": "gpt_neox", "grid": BOTH, "schedule": "seq1f1b-zb"},
    # parameters on shares of a layer that no plan names: a scalar of the activation, norms of heads
    "unnamed scalar": {"family": "apertus", "grid": BOTH, "fields": {"base_model_tp_plan": OLDER_PLAN}},
    "unnamed norms": {"family": "phi", "grid": BOTH, "fields": {"qk_layernorm": True}},
    # without rotation the bias of keys has no gradient, but for rounding
    "shared heads, biases": {
        "family": "smollm3", "grid": BOTH,
        "fields": {"num_key_value_heads": 1, "attention_bias": True, "no_rope_layers": [0] * 8},
    },
    # the sum of a router's gradients is zero, but for the rounding of fp32; 64 features and more
    "router in fp32": {"family": "mixtral", "grid": (1, 1, 2), "is_fp32": True, "fields": {"hidden_size": 64}},
    # layers that add nothing at first: in the first step nothing before their last weights has a gradient
    "zeros": {"family": "qwen3", "grid": (1, 1, 2), "zeros": ("o_proj", "down_proj")},
    "zeros, shared head": {
        "family": "llama", "grid": (1, 1, 2), "zeros": ("o_proj", "down_proj"), "fields": {"num_key_value_heads": 1},
    },
    "zeros, unnamed scalar": {
        "family": "apertus", "grid": BOTH, "zeros": ("o_proj", "down_proj"),
        "fields": {"base_model_tp_plan": OLDER_PLAN},
    },
    **{family: {"family": family, "grid": BOTH, **VERIFIED} for family in FAMILIES},
    **{f"{family} in bf16": {"family": family, "grid": BOTH, "is_bf16": True, **VERIFIED} for family in FAMILIES},
    "tied copies, clipping": {"family": "gemma2", "grid": BOTH, "fields": {"vocab_size": 67}, "clipping": 0.01},
    "all logits, tied copies": {"family": "gemma2", "grid": BOTH, "all_logits": True, "fields": {"vocab_size": 67}},
    "one shared head": {"family": "gemma", "grid": BOTH, "fields": {"num_key_value_heads": 1}},
    "odd, tied": {"family": "olmo", "grid": BOTH, "fields": ODD_AND_TIED},
    "odd, untied": {"family": "llama", "grid": BOTH, "fields": {"vocab_size": 67}},
    "all logits": {"family": "llama", "grid": BOTH, "all_logits": True},
    "all logits, tied": {"family": "llama", "grid": BOTH, "all_logits": True, "fields": ODD_AND_TIED},
    "replicas": {"family": "phi", "grid": (1, 2, 2)},
    "zbv": {"family": "llama", "grid": BOTH, "schedule": "zbv"},
    "copies": {"family": "qwen3", "grid": BOTH, "schedule": "chimera-seq"},
    "measured": {"family": "llama", "grid": BOTH, "slices": "auto"},
    "finite": {"family": "llama", "grid": BOTH, "check_finite": "every_step"},
}  # fmt: skip
BY_DEFAULT = (
    "shared heads", "odd vocabulary, clipping", "unnamed scalar", "router in fp32", "zeros", "qwen3 in bf16",
)  # fmt: skip


@pytest.mark.parametrize("case", [pytest.param(k, marks=() if k in BY_DEFAULT else pytest.mark.full) for k in CASES])
def test_a_step_is_that_of_the_whole_model(case: str) -> None:
    """Loss, gradients and parameters of two steps of two micro-batches in three slices: to 1e-10 in fp64."""
    given = CASES[case]
    errors = rank_pool(math.prod(given["grid"])).run(train_divided, **given)
    kept = [each.pop("kept", 0) for each in errors]
    assert all(kept) or not given.get("schedule", "").endswith("zb")
    limit = 1e-2 if given.get("is_bf16") else 1e-4 if given.get("is_fp32") else engines.EXACT
    if "clipping" in given:
        limit, errors = 1e-6, [{key: each[key] for key in ("loss", "parameter")} for each in errors]
    assert not engines.violations(errors, limit)


@pytest.mark.parametrize(
    ("grid", "fields"),
    [
        (BOTH, {}),
        pytest.param((1, 1, 4), {}, marks=pytest.mark.full),
        pytest.param(BOTH, {"target_modules": ["v_proj"], "modules_to_save": ["lm_head"]}, marks=pytest.mark.full),
        pytest.param((2, 2, 1), {}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_adapters_train_and_are_saved_whole(grid: Any, fields: dict[str, Any], tmp_path: Path) -> None:
    errors = rank_pool(4).run(train_adapters, grid=grid, folder=str(tmp_path), **fields)
    assert not engines.violations([each[0] for each in errors]) and not engines.violations(errors[0][1:])


@pytest.mark.parametrize("family", ["llama", pytest.param("gemma3_text", marks=pytest.mark.full)])
def test_weights_are_read_in_shares_and_written_whole(family: str, tmp_path: Path) -> None:
    grids = [BOTH, (1, 1, 4)]
    for found in rank_pool(4).run(through_folders, family=family, folder=str(tmp_path), grids=grids):
        assert found["read 0"] and found["read 1"] and found["evaluation"] <= 1e-5
        assert found["largest share 0"] == 0.5


@pytest.mark.parametrize(
    ("family", "fields", "grid_of_writer"),
    [
        ("qwen3", {}, BOTH),
        pytest.param("qwen3", {}, (2, 2, 1), marks=pytest.mark.full),
        pytest.param("gemma2", {}, BOTH, marks=pytest.mark.full),
        pytest.param("llama", {"target_modules": "all-linear"}, BOTH, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_checkpoint_moves_to_another_layout(
    family: str, fields: dict[str, Any], grid_of_writer: tuple[int, int, int], tmp_path: Path
) -> None:
    pool, folder = rank_pool(4), str(tmp_path)
    expected = pool.run(write_checkpoint, family=family, grid=grid_of_writer, folder=folder, **fields)[0]
    grids = [(1, 1, 4), *([BOTH, (2, 2, 1), (4, 1, 1)] if FULL else [])]
    for grid, universal in [*((grid, True) for grid in grids), *([(grid_of_writer, False)] if FULL else [])]:
        options = {"family": family, "grid": grid, "folder": folder, "universal": universal}
        for losses in pool.run(read_checkpoint, **options, **fields):
            assert losses == pytest.approx(expected, rel=1e-5), grid


def test_a_strategy_runs_by_its_config_and_its_topology() -> None:
    strategy = strategy_of(
        dims=[2, 1, 2], devices_per_node=4, partition=[0, 3, 7], slices=[7, 3, 6], accumulation=2, zero_stage=1
    )
    for config, errors in rank_pool(4).run(by_strategy, family="llama", strategy=strategy.to_json()):
        assert config["tensor_parallel"] == {"autotp_size": 2}
        assert max(errors) <= 1e-5


PLAN = "layers.*.self_attn."
REFUSALS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2 cannot be trained in stages and token slices: its config has no plan": (
        "ModelRefusedError", {"family": "gpt2"},
    ),
    "its 4 attention heads do not divide over 3": ("ModelRefusedError", {"grid": (1, 1, 3)}),
    "its 3 key and value heads do not divide by 2": (
        "ModelRefusedError", {"fields": {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8}},
    ),
    "has attention_dropout = 0.1": ("ModelRefusedError", {"fields": {"attention_dropout": 0.1}}),
    "(MixtralDecoderLayer) draws random numbers in training": (
        "ModelRefusedError", {"family": "mixtral", "fields": {"router_jitter_noise": 0.1}},
    ),
    "LoraConfig has lora_dropout or use_dora": ("ModelRefusedError", {"adapter": {"lora_dropout": 0.1}}),
    "mlp.down_proj: 'diagonal'": ("ModelRefusedError", {"plan": {"layers.*.mlp.down_proj": "diagonal"}}),
    "cannot be divided over 2 tensor-parallel ranks by its plan": (
        "ModelRefusedError", {"plan": {f"{PLAN}q_norm": None, f"{PLAN}k_norm": None, f"{PLAN}o_proj": None}},
    ),
    "gradients of mlp.act_fn.alpha_p are not whole, and their sum is neither": (
        "ModelRefusedError",
        {"family": "apertus", "is_used_twice": True, "fields": {"base_model_tp_plan": OLDER_PLAN}},
    ),
    "by its plan: found by one rank": ("ModelRefusedError", {"is_alone": True}),
    "different gradients for 1 of 9 parameters": ("ReplicatedGradientError", {"step": True, "apart": True}),
    f"tokens outside of the vocabulary of {VOCAB_SIZE}: 1, first token 200": (
        "ValueError", {"step": True, "token": 200},
    ),
    "the layers of the module are divided over 2 ranks": (
        "TeraPipeConfigError", {"tensor_parallel": {"autotp_size": 4}},
    ),
    "would not sum gradients over tensor-parallel ranks": ("ModelRefusedError", {"terapipe": None, "step": True}),
}  # fmt: skip


@pytest.mark.parametrize("text", REFUSALS)
def test_divisions_that_are_refused_on_all_ranks(text: str) -> None:
    kind, given = REFUSALS[text]
    defaults = {"family": "qwen3", "grid": (1, 1, 2), "fields": {}, "plan": {}, "step": False}
    grid = given.get("grid", (1, 1, 2))
    for error in rank_pool(grid[2]).run(refusal, **defaults | given):
        assert kind in " ".join(error) and text in error[1], error  # a peer may report the one that failed first
