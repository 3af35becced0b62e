"""Test that adapters of peft train on stages as in one process, also if a stage has none."""

import functools
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft", reason="needs the extra hf: pip install terapipe_ds[hf]")

import contextlib
import json
from unittest import mock

import torch
import torch.distributed as torch_dist
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import terapipe_ds
from terapipe_ds.models.hugging_face.weights.stored import DrawnWeights
from terapipe_ds.runtime.layout.layer_names import NOTHING_TRAINED
from tests.distributed import engines
from tests.distributed.cases import relative_error
from tests.distributed.harness import rank_pool
from tests.distributed.hugging_face_files import write_model
from tests.distributed.hugging_face_jobs import batches, differences, engine_of, train_whole, weights_of_all_stages
from tests.hugging_face_families import VOCAB_SIZE, config_of
from tests.unit.models.hugging_face.sliced_model import in_fp64, loss_of

SECTION = engines.section(slices=[7, 3, 6], verify="off")


def train_adapters(
    family: str,
    terapipe: dict[str, Any],
    folder: str,
    stages: int = 2,
    is_bf16: bool = False,
    clipping: float = 0.0,
    gradients_in: str = "bf16",
    **adapter_fields: Any,
) -> dict[str, float]:
    """Return the largest errors on this rank; and whether peft reads the saved adapters, with the same values.

    In bf16 with ZeRO-1, only the losses are compared. A `bias` begins with values other than zero.
    """
    dtype = torch.float32 if is_bf16 else torch.float64
    data_types = {"data_types": {"grad_accum_dtype": gradients_in}}  # in fp32 by another optimizer of DeepSpeed's
    changes: dict[str, Any] = {"bf16": {"enabled": True}, **engines.ZERO1, **data_types} if is_bf16 else {}
    changes["gradient_clipping"] = clipping
    with contextlib.nullcontext() if is_bf16 else in_fp64():
        config = config_of(family, 2 * stages)
        adapter = LoraConfig(
            **{"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, **adapter_fields}
        )
        module = terapipe_ds.from_config(config, num_stages=stages, dtype=dtype, adapter=adapter)
        weights = weights_of_all_stages(module)
        base = AutoModelForCausalLM.from_config(config, dtype=dtype)
        model = get_peft_model(base, adapter).train()
        base.load_state_dict(weights, strict=False)
        given = {key.removeprefix("base_model.model.") for key in model.state_dict()}
        assert set(weights) <= given
        data = batches(config.vocab_size)
        with engine_of(module, terapipe, **changes) as engine:
            run = engines.train(engine, [[module.to_tuple(batch) for batch in step] for step in data])
            terapipe_ds.save_pretrained(engine, folder)
            names = module.checkpoint_names()
        for each in (run.parameters, *run.gradients):
            each.pop(NOTHING_TRAINED, None)
        losses, gradients, parameters = train_whole(model, data, clipping)
        if is_bf16:
            return {"loss": max(relative_error(a, b) for a, b in zip(run.returned, losses, strict=True))}
        own = {key.removeprefix("base_model.model."): value for key, value in parameters.items()}
        cut = [{key.removeprefix("base_model.model."): g for key, g in step.items()} for step in gradients]
        errors = differences(run, names, losses, cut, own)
        torch_dist.barrier()
        fresh = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
        peft_model = PeftModel.from_pretrained(fresh, folder)
        read = peft_model.state_dict()
        saved = [
            float((read[f"base_model.model.{name}"] - module.get_parameter(local)).abs().max())
            for local, name in names.items()
            if module.get_parameter(local).requires_grad
        ]
        errors["saved"] = max(saved, default=0.0)
        return errors


def folders_of_adapters(folder: str, **adapter_fields: Any) -> dict[str, Any]:
    """Train adapters on a model in a folder, save them, go on from them; return the findings on this rank."""
    base, first, second, whole = (f"{folder}/{name}" for name in ("base", "first", "second", "whole"))
    write_model("qwen2", base)
    fields = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, **adapter_fields}
    found = dict[str, Any]()
    module = terapipe_ds.from_pretrained(base, num_stages=2, adapter=LoraConfig(**fields))
    data = [[module.to_tuple(batch) for batch in step] for step in batches(VOCAB_SIZE)]
    with engine_of(module, SECTION) as engine:
        engines.train(engine, data)
        evaluated = float(engine.eval_batch(iter(data[0])))
        engine.save_checkpoint(f"{folder}/checkpoint")
        terapipe_ds.save_pretrained(engine, first)
        terapipe_ds.save_pretrained(engine, whole, merge=True)
    torch_dist.barrier()
    if torch_dist.get_rank() == 0:  # of an earlier run, by the same family
        AutoModelForCausalLM.from_config(config_of("qwen2")).save_pretrained(first)
    torch_dist.barrier()
    config = json.loads(Path(first, "adapter_config.json").read_text())
    found["config"] = config["base_model_name_or_path"] == base and config["inference_mode"]
    by_peft = AutoPeftModelForCausalLM.from_pretrained(first).eval()  # it finds the class of the model
    by_transformers = AutoModelForCausalLM.from_pretrained(whole).eval()
    for name, model in (("peft", by_peft), ("merged", by_transformers)):
        with torch.no_grad():
            losses = [float(loss_of(model, batch)) for batch in batches(VOCAB_SIZE)[0]]
        found[name] = relative_error(evaluated, sum(losses) / len(losses))
    for name, given in (("again", {"folder": base, "adapter": first}), ("alone", {"folder": first})):
        module = terapipe_ds.from_pretrained(num_stages=2, **given)
        with engine_of(module, SECTION) as engine:
            found[name] = relative_error(float(engine.eval_batch(iter(data[0]))), evaluated)
            if name == "again":
                engines.train(engine, data[:1])
                with engines.logged() as lines:
                    for kept in (second, whole):
                        terapipe_ds.save_pretrained(engine, kept)
                found["warned"] = [whole in line for line in lines if "has a whole model" in line]
    torch_dist.barrier()
    module = terapipe_ds.from_pretrained(base, num_stages=2, adapter=LoraConfig(**fields))
    with engine_of(module, SECTION) as engine:
        engine.load_checkpoint(f"{folder}/checkpoint")
        found["restored"] = relative_error(float(engine.eval_batch(iter(data[0]))), evaluated)
    one, two = (load_file(f"{each}/adapter_model.safetensors") for each in (first, second))
    found["moved"] = one.keys() == two.keys() and all(not torch.equal(one[key], two[key]) for key in one)
    return found


def folder_of_peft(folder: str, targets: Any) -> tuple[float, bool]:
    """Return the error of the loss on adapters that peft has saved, and whether stages save the same values again."""
    base, first, second = (f"{folder}/{name}" for name in ("base", "first", "second"))
    write_model("qwen2", base)
    model = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)  # peft's file has this weight, and the folder of the model another one
    torch.manual_seed(4)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False)).eval()
    if torch_dist.get_rank() == 0:
        model.save_pretrained(first)
    torch_dist.barrier()
    module, data = terapipe_ds.from_pretrained(first, num_stages=2), batches(VOCAB_SIZE)[0]
    with engine_of(module, SECTION) as engine:
        evaluated = float(engine.eval_batch(iter([module.to_tuple(batch) for batch in data])))
        terapipe_ds.save_pretrained(engine, second)
    torch_dist.barrier()
    with torch.no_grad():
        expected = sum(float(loss_of(model, batch)) for batch in data) / len(data)
    one, two = (load_file(f"{each}/adapter_model.safetensors") for each in (first, second))
    return relative_error(evaluated, expected), one.keys() == two.keys() and all(
        map(torch.equal, *map(by_key, (one, two)))
    )


def dtypes_beside_16_bits(folder: str, **adapter_fields: Any) -> list[bool]:
    """Return whether weights beside bf16 have the dtypes of peft, by their source; and merged ones bf16."""
    base, saved = f"{folder}/base", f"{folder}/adapters"
    if torch_dist.get_rank() == 0:
        AutoModelForCausalLM.from_config(config_of("llama"), dtype=torch.bfloat16).save_pretrained(base)
    torch_dist.barrier()
    adapter = LoraConfig(r=4, target_modules=["q_proj"], **adapter_fields)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype="auto"), adapter)
    if torch_dist.get_rank() == 0:
        model.save_pretrained(saved)
    torch_dist.barrier()
    expected = {key.removeprefix("base_model.model."): p.dtype for key, p in model.named_parameters()}
    skeleton = get_peft_model(terapipe_ds.skeleton(base), adapter)
    found = []
    for source, given in ((base, adapter), (saved, None), (skeleton, None), (model, None)):
        module = terapipe_ds.from_pretrained(source, num_stages=2, adapter=given)
        dtypes = {name: weight.dtype for name, weight in weights_of_all_stages(module).items()}
        found.append(all(expected[name] is dtype for name, dtype in dtypes.items()) and len({*dtypes.values()}) == 2)
    with engine_of(module, SECTION) as engine:
        terapipe_ds.save_pretrained(engine, f"{folder}/merged", merge=True)
    merged = AutoModelForCausalLM.from_pretrained(f"{folder}/merged", dtype="auto")
    return [*found, merged.config.dtype is merged.dtype is torch.bfloat16]


def number_of_trials() -> int:
    """Return how many layers of a model with adapters are tried."""
    adapter = LoraConfig(r=2, target_modules=["q_proj"])
    return len(terapipe_ds.from_config(config_of("llama"), num_stages=1, adapter=adapter).blueprint._ways)


def resized(folder: str, family: str, **fields: Any) -> bool:
    """Return whether peft reads all weights of a model whose vocabulary has grown since its folder, and stages do."""
    base, saved, again = f"{folder}/base", f"{folder}/saved", f"{folder}/again"
    write_model(family, base)

    def grown() -> Any:
        model = AutoModelForCausalLM.from_pretrained(base)
        model.resize_token_embeddings(80, mean_resizing=False)  # draws the new rows
        return model

    torch.manual_seed(4)
    model = get_peft_model(grown(), LoraConfig(r=4, init_lora_weights=False, **fields))
    with engine_of(terapipe_ds.from_pretrained(model, num_stages=2), SECTION) as engine:
        terapipe_ds.save_pretrained(engine, saved)
    torch_dist.barrier()
    with engine_of(terapipe_ds.from_pretrained(grown(), num_stages=2, adapter=saved), SECTION) as engine:
        terapipe_ds.save_pretrained(engine, again)
    torch_dist.barrier()
    for each in (saved, again):
        read = PeftModel.from_pretrained(grown(), each).state_dict()
        if not all(torch.equal(v, read[key]) for key, v in model.state_dict().items() if "original_" not in key):
            return False
    return True


def by_key(tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [tensors[key] for key in sorted(tensors)]


def refusal_on_one_rank(folder: str, case: str) -> tuple[str, str]:
    """Return the error on this rank if the other one has no adapters, or cannot build a layer."""
    is_here = torch_dist.get_rank() == 1
    if case == "no folder":
        adapter = LoraConfig(r=4, target_modules=["q_proj"])
        given = f"{folder}/nothing" if is_here else adapter
        return engines.raised_by(lambda: terapipe_ds.from_config(config_of("qwen2"), num_stages=2, adapter=given))

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    with mock.patch.object(DrawnWeights, "fill", fail) if is_here else contextlib.nullcontext():
        return engines.raised_by(lambda: terapipe_ds.from_config(config_of("llama"), num_stages=2))


def refusal_of_folders(folder: str, case: str) -> tuple[str, str]:
    """Return the error that the wrong folder of adapters, or none, raises on this rank."""
    base, adapters = f"{folder}/base", f"{folder}/adapters"
    write_model("qwen2", base)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=4, target_modules=["q_proj"]))
    if torch_dist.get_rank() == 0:
        bias: Any = "lora_only" if case == "no biases" else "none"
        fields = LoraConfig(r=1 if case == "other rank" else 4, target_modules=["q_proj"], bias=bias)
        wide = get_peft_model(AutoModelForCausalLM.from_pretrained(base), fields)
        wide.save_pretrained(adapters)
        weights = Path(adapters, "adapter_model.safetensors")
        save_file({key: each for key, each in load_file(weights).items() if not key.endswith("bias")}, weights)
        path = Path(adapters, "adapter_config.json")
        config = json.loads(path.read_text())
        config["base_model_name_or_path"] = "somebody/model"
        if case == "other adapters":
            config["target_modules"] = ["v_proj"]
        if case == "unknown kind":
            config["peft_type"] = "OF_A_LATER_VERSION"
        if case == "other rank":
            config["r"] = 4  # one row could be copied into four
        path.write_text("{" if case == "no config" else json.dumps(config))
        if case == "half a file":
            weights.write_bytes(weights.read_bytes()[:-9])
    torch_dist.barrier()
    if case == "merged":
        model.merge_adapter()
    if case == "quantized":
        model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    given: dict[str, dict[str, Any]] = {
        "base elsewhere": {"folder": adapters},
        "other adapters": {"folder": base, "adapter": adapters},
        "two": {"folder": model, "adapter": adapters},
        "two folders": {"folder": adapters, "adapter": LoraConfig(r=4)},
        "other rank": {"folder": base, "adapter": adapters},
        **{
            key: {"folder": base, "adapter": adapters}
            for key in ("no biases", "no config", "unknown kind", "half a file")
        },
        "merged": {"folder": model},
        "quantized": {"folder": model},
    }
    return engines.raised_by(lambda: terapipe_ds.from_pretrained(num_stages=2, **given[case]))


@pytest.mark.sample(1)
@pytest.mark.parametrize("layers", [[0, 1, 2, 3], [0], [3]], ids=["everywhere", "first stage", "last stage"])
@pytest.mark.parametrize("schedule", ["seq1f1b", "zbv"])
@pytest.mark.parametrize("is_bf16", [False, True], ids=["fp64", "bf16 with ZeRO-1"])
def test_adapters_equal_one_process(is_bf16: bool, schedule: str, layers: list[int], tmp_path: Path) -> None:
    """To 1e-10 in fp64, where peft reads what is saved, with the same values; losses in bf16 to 1e-2."""
    section = engines.section(slices=[7, 3, 6], schedule=schedule)  # which checks the first batch
    given = {"family": "llama", "terapipe": section, "layers_to_transform": layers, "is_bf16": is_bf16}
    errors = rank_pool(2).run(train_adapters, folder=str(tmp_path), **given)
    assert not engines.violations(errors, 1e-2 if is_bf16 else engines.EXACT)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": "all-linear"},
        {"bias": "all"},
        {"bias": "lora_only", "layers_to_transform": [2]},
        {"modules_to_save": ["lm_head", "norm"]},
        {"modules_to_save": ["embed_tokens"], "layers_to_transform": [3]},
        {"target_modules": ["embed_tokens", "o_proj"]},
        {"use_dora": True},
    ],
    ids=str,
)
def test_what_peft_trains_is_trained_and_saved(fields: dict[str, Any], tmp_path: Path) -> None:
    arguments = {"family": "qwen2", "terapipe": {**SECTION, "schedule": "zbv"}}
    errors = rank_pool(2).run(train_adapters, folder=str(tmp_path), **arguments, **fields)
    assert not engines.violations(errors)


def test_adapters_beside_16_bits_have_32_as_in_peft(tmp_path: Path) -> None:
    """Without bf16 in DeepSpeed's config there are no other copies: small steps would round to nothing."""
    found = rank_pool(2).run(dtypes_beside_16_bits, folder=str(tmp_path), modules_to_save=["lm_head"])
    assert found == [[True] * 5] * 2


def test_layers_with_adapters_are_tried_once() -> None:
    """Peft keeps the name of each module, with the number of its layer."""
    assert rank_pool(1).run(number_of_trials) == [1]


@pytest.mark.sample(1)
@pytest.mark.parametrize("layers", [[0, 1, 2, 3], [3]], ids=["everywhere", "last stage"])
def test_gradients_are_clipped_by_the_norm_of_all_stages(layers: list[int], tmp_path: Path) -> None:
    """Norms are fp32 in DeepSpeed."""
    arguments = {"family": "llama", "terapipe": SECTION, "layers_to_transform": layers}
    errors = rank_pool(2).run(train_adapters, folder=str(tmp_path), clipping=0.01, **arguments)
    assert not engines.violations([{key: each[key] for key in ("loss", "parameter")} for each in errors], 1e-6)


@pytest.mark.sample(1)
@pytest.mark.parametrize("fields", [{}, {"modules_to_save": ["lm_head"], "bias": "all"}], ids=str)
def test_folders_of_adapters(fields: dict[str, Any], tmp_path: Path) -> None:
    """peft, transformers and a second run read what is saved, with the losses of the engine.

    So it is beside a model that the folder had before.
    """
    for rank, found in enumerate(rank_pool(2).run(folders_of_adapters, folder=str(tmp_path), **fields)):
        assert found["config"] and found["moved"] and found["warned"] == [True] * (rank == 0)
        assert all(found[name] <= 1e-5 for name in ("peft", "merged", "again", "alone", "restored")), found


@pytest.mark.parametrize("targets", [["q_proj", "lm_head"], r".*(q_proj|lm_head)"], ids=str)
def test_adapters_of_an_output_matrix_that_peft_has_saved(targets: Any, tmp_path: Path) -> None:
    """peft saves the matrix beside them, under either form of the targets."""
    for error, is_same in rank_pool(2).run(folder_of_peft, folder=str(tmp_path), targets=targets):
        assert error <= 1e-5 and is_same


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {"target_modules": ["q_proj", "lm_head"]}),
        ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
        ("gpt2", {"target_modules": ["c_attn"]}),  # whose output matrix is the embedding
    ],
    ids=str,
)
def test_new_rows_of_an_embedding_are_saved_beside_adapters(family: str, fields: Any, tmp_path: Path) -> None:
    assert rank_pool(2).run(resized, folder=str(tmp_path), family=family, **fields) == [True, True]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("family", "fields", "text"),
    [
        ("gpt2", {"target_modules": ["wte"]}, "leave both out of target_modules"),
        ("gpt2", {"modules_to_save": ["lm_head"]}, "leave both out of target_modules"),
        ("llama", {"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
        ("llama", {"target_modules": ["nothing"]}, "not found in the base model"),
    ],
    ids=lambda each: str(each),
)
def test_adapters_that_are_refused(family: str, fields: dict[str, Any], text: str) -> None:
    given = {"num_stages": 2, "adapter": LoraConfig(**{"r": 4, **fields})}
    act = functools.partial(terapipe_ds.from_config, config_of(family), **given)
    for kind, message in rank_pool(2).run(engines.raised_by, act=act):
        assert kind == "ModelRefusedError" and text in message


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("base elsewhere", "'somebody/model' is no folder, and not on the hub or in its cache"),
        ("other adapters", "do not agree on"),
        ("two", "leave out adapter="),
        ("two folders", "has adapters (adapter_config.json), and others are given: leave out adapter="),
        ("other rank", "do not agree on"),
        ("no biases", "q_proj.base_layer.bias"),
        ("no config", "adapter_config.json is no JSON"),
        ("unknown kind", "adapter_config.json (KeyError: 'OF_A_LATER_VERSION'): install the version"),
        ("half a file", "adapter_model.safetensors cannot be read"),
        ("merged", "call model.unmerge_adapter()"),
        ("quantized", "its weights are quantized"),
    ],
)
def test_folders_that_are_refused(case: str, text: str, tmp_path: Path) -> None:
    for kind, message in rank_pool(2).run(refusal_of_folders, folder=str(tmp_path), case=case):
        assert kind == "ModelRefusedError" and text in message


@pytest.mark.parametrize(
    ("case", "text"), [("no folder", "adapter_config.json"), ("no memory", "RuntimeError: out of")]
)
def test_what_one_rank_cannot_build_stops_all(case: str, text: str, tmp_path: Path) -> None:
    for kind, message in rank_pool(2).run(refusal_on_one_rank, folder=str(tmp_path), case=case):
        assert kind == "ModelRefusedError" and text in message


@pytest.mark.sample(1)
@pytest.mark.parametrize("is_bf16", [False, True], ids=["fp64", "bf16 with ZeRO-1"])
@pytest.mark.parametrize("schedule", ["seq1f1b", "zbv"])
def test_three_stages_with_one_that_is_frozen(schedule: str, is_bf16: bool, tmp_path: Path) -> None:
    """fp64 to 1e-10; losses in bf16 to 1e-2. With zbv the ends of the model are on one stage, and two are frozen."""
    section = {**SECTION, "schedule": schedule}
    given = {"family": "llama", "terapipe": section, "layers_to_transform": [0, 5]}
    errors = rank_pool(3).run(train_adapters, folder=str(tmp_path), stages=3, is_bf16=is_bf16, **given)
    assert not engines.violations(errors, 1e-2 if is_bf16 else engines.EXACT)


def test_frozen_weights_that_are_tied(tmp_path: Path) -> None:
    """Embedding and output matrix are one, on two stages, and have no gradients to sum."""
    arguments = {"family": "gemma", "terapipe": SECTION, "layers_to_transform": [0, 3]}
    bf16 = {"is_bf16": True, "gradients_in": "fp32"}
    assert not engines.violations(rank_pool(2).run(train_adapters, folder=str(tmp_path), **arguments, **bf16), 1e-2)
