"""Test that adapters train beside 4-bit weights of bitsandbytes on stages as they do in one process."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft", reason="needs the extra hf: pip install terapipe_ds[hf]")
pytest.importorskip("bitsandbytes", reason="needs the extra qlora: pip install terapipe_ds[qlora]")

import json
from functools import partial

import torch
import torch.distributed as torch_dist
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import terapipe_ds
from terapipe_ds.runtime.layout.layer_names import NOTHING_TRAINED
from tests.distributed import engines
from tests.distributed.cases import relative_error
from tests.distributed.harness import rank_pool
from tests.distributed.hugging_face_jobs import batches, differences, engine_of, train_whole, weights_of_all_stages
from tests.hugging_face_families import IS_4, VOCAB_SIZE, config_of
from tests.unit.models.hugging_face.sliced_model import loss_of

FORM = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}


def adapter_of(**fields: Any) -> LoraConfig:
    """Return adapters without factors of zero, and small enough for gradients to be more than rounding."""
    fields = {"r": 4, "lora_alpha": 1, "target_modules": "all-linear", "init_lora_weights": False, **fields}
    return LoraConfig(**fields)


def write_base(family: str, folder: str, seed: int = 3) -> None:
    """Write a random model of four layers."""
    if torch_dist.get_rank() == 0:
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config_of(family, 4), dtype=torch.bfloat16).save_pretrained(folder)
    torch_dist.barrier()


def train_quantized(
    folder: str,
    terapipe: dict[str, Any],
    family: str = "llama",
    is_bf16: bool = False,
    is_stored: bool = False,
    adapter: dict[str, Any] | None = None,
    form: dict[str, Any] | None = None,
    stages: int = 2,
    **changes: Any,
) -> dict[str, float]:
    """Return the largest errors on this rank against the model that transformers quantizes, and peft trains."""
    base, dtype = f"{folder}/{family}", torch.float32
    quantization, fields = BitsAndBytesConfig(**FORM, **(form or {})), adapter_of(**(adapter or {}))
    given: dict[str, Any] = {"quantization_config": quantization}
    write_base(family, base)
    theirs = AutoModelForCausalLM.from_pretrained(base, dtype=dtype, **given)
    if is_stored:
        base, given = f"{base}-nf4", {}
        if torch_dist.get_rank() == 0:
            theirs.save_pretrained(base)
        torch_dist.barrier()
    module = terapipe_ds.from_pretrained(base, num_stages=stages, dtype=dtype, adapter=fields, **given)
    model = get_peft_model(theirs, fields).train()
    weights = weights_of_all_stages(module)
    own = {key.removeprefix("base_model.model."): value for key, value in model.named_parameters()}
    assert any(value.dtype is torch.uint8 for value in weights.values())
    for key, value in weights.items():  # the frozen ones are equal, bit for bit
        if own[key].requires_grad:
            own[key].data = value.clone()
        assert torch.equal(value, own[key]), key
    data = batches(VOCAB_SIZE)
    if is_bf16:
        changes |= {"bf16": {"enabled": True}, **engines.ZERO1}
    with engine_of(module, terapipe, **changes) as engine:
        run = engines.train(engine, [[module.to_tuple(batch) for batch in step] for step in data])
        names = module.checkpoint_names()
        frozen = {key: p for key, p in module.named_parameters() if not (p.requires_grad or is_bf16)}
        assert all(torch.equal(value, own[names[key]]) for key, value in frozen.items())
    for each in (run.parameters, *run.gradients):
        each.pop(NOTHING_TRAINED, None)
    run.parameters = {name: p for name, p in run.parameters.items() if module.get_parameter(name).requires_grad}
    losses, gradients, parameters = train_whole(model, data)
    if is_bf16:
        return {"loss": max(relative_error(a, b) for a, b in zip(run.returned, losses, strict=True))}
    cut = [{key.removeprefix("base_model.model."): g for key, g in step.items()} for step in gradients]
    trained = {key.removeprefix("base_model.model."): p for key, p in parameters.items() if p.requires_grad}
    return differences(run, names, losses, cut, trained)


def folders_of_adapters(folder: str) -> dict[str, Any]:
    """Train adapters, save them and a checkpoint, and go on from both; return the findings on this rank."""
    base, other, saved, checkpoint = (f"{folder}/{name}" for name in ("base", "other", "saved", "checkpoint"))
    write_base("llama", base)
    write_base("llama", other, seed=4)
    given: dict[str, Any] = {"dtype": torch.float32, "quantization_config": BitsAndBytesConfig(**FORM)}
    section, found = engines.section(slices=[7, 3, 6], verify="off"), dict[str, Any]()
    module = terapipe_ds.from_pretrained(base, num_stages=2, adapter=adapter_of(), **given)
    data = [[module.to_tuple(batch) for batch in step] for step in batches(VOCAB_SIZE)]

    def evaluate(module: Any, schedule: str = "seq1f1b", tag: str | None = None) -> float:
        with engine_of(module, {**section, "schedule": schedule}) as engine:
            if tag is not None:
                engine.load_checkpoint(checkpoint, tag, load_module_strict=tag == "all")
            return float(engine.eval_batch(iter(data[0])))

    with engine_of(module, section) as engine:
        engine.eval_batch(iter(data[0]))  # bitsandbytes may pack weights for it
        engines.train(engine, data[:1])
        evaluated = float(engine.eval_batch(iter(data[0])))
        engine.save_checkpoint(checkpoint, "all")
        engine.save_checkpoint(checkpoint, "trained", exclude_frozen_parameters=True)
        terapipe_ds.save_pretrained(engine, saved)
        found["merge"] = engines.raised_by(lambda: terapipe_ds.save_pretrained(engine, saved, merge=True))[1]
    torch_dist.barrier()
    found["files"] = sorted(path.name for path in Path(saved).iterdir())
    found["base"] = json.loads(Path(saved, "adapter_config.json").read_text())["base_model_name_or_path"] == base
    # transformers and peft read the adapters
    theirs = AutoModelForCausalLM.from_pretrained(base, **given)
    model = PeftModel.from_pretrained(theirs, saved).train()  # in evaluation bitsandbytes has kernels of less precision
    with torch.no_grad():
        losses = [float(loss_of(model, batch)) for batch in batches(VOCAB_SIZE)[0]]
    found["peft"] = relative_error(evaluated, sum(losses) / len(losses))
    # so do stages, with other parts too; a checkpoint with the quantized weights restores them over any others
    found["again"] = relative_error(evaluate(terapipe_ds.from_pretrained(saved, num_stages=2, **given)), evaluated)
    fresh = terapipe_ds.from_pretrained(other, num_stages=2, adapter=adapter_of(), **given)
    found["other"] = relative_error(evaluate(fresh, "zbv", "all"), evaluated)
    # layers with values move; a skeleton with adapters is cut, and reads the weights that a checkpoint leaves out
    moved = terapipe_ds.from_pretrained(saved, num_stages=2, **given).float()
    found["moved"] = relative_error(evaluate(moved, "zbv"), evaluated)
    skeleton = terapipe_ds.skeleton(base, torch.float32, quantization_config=given["quantization_config"])
    module = terapipe_ds.from_pretrained(get_peft_model(skeleton, adapter_of()), num_stages=2)
    found["skeleton"] = relative_error(evaluate(module, tag="trained"), evaluated)
    return found


def refusals(folder: str) -> dict[str, str]:
    """Return the error of each case that is refused on this rank."""
    write_base("llama", folder)
    given: dict[str, Any] = {"folder": folder, "quantization_config": BitsAndBytesConfig(**FORM)}
    topology = PipeModelDataParallelTopology(num_pp=1, num_mp=2, num_dp=1)
    cases: dict[str, dict[str, Any]] = {
        "nothing trained": given,
        "tensor ranks": {**given, "adapter": adapter_of(), "topology": topology},
        "in memory": {"folder": AutoModelForCausalLM.from_pretrained(**_named(given)), "adapter": adapter_of()},
        "two": {**given, "folder": AutoModelForCausalLM.from_pretrained(folder)},
        "dora": {**given, "adapter": adapter_of(use_dora=True)},
        "bias": {**given, "adapter": adapter_of(bias="all")},
        "8 bits": {**given, "quantization_config": BitsAndBytesConfig(load_in_8bit=True), "adapter": adapter_of()},
    }
    return {case: engines.raised_by(partial(terapipe_ds.from_pretrained, **each))[1] for case, each in cases.items()}


def _named(given: dict[str, Any]) -> dict[str, Any]:
    return {"pretrained_model_name_or_path" if key == "folder" else key: value for key, value in given.items()}


pytestmark = pytest.mark.skipif(IS_4, reason="transformers 4.57 cannot quantize layer by layer")
VERIFIED = {"verify": "first_batch", "recompute": "full", "offload_activations": True}


class TestQuantizedBases:
    @pytest.mark.parametrize(
        "given",
        [
            {"terapipe": {"slices": 1}},
            {"terapipe": {"slices": 4, "schedule": "seq1f1b-zb"}, "is_stored": True},
            {"terapipe": VERIFIED, "family": "gemma"},
        ],
        ids=["whole", "slices, split backwards, stored quantized", "tied, verify, recompute, offload"],
    )
    def test_adapters_equal_one_process(self, given: dict[str, Any], tmp_path: Path) -> None:
        """Losses, gradients and adapters to 1e-6; the frozen weights are equal bit for bit, and do not change."""
        given = {**given, "terapipe": engines.section(**{"verify": "off", **given["terapipe"]})}
        assert not engines.violations(rank_pool(2).run(train_quantized, folder=str(tmp_path), **given), 1e-6)

    @pytest.mark.sample(1)
    @pytest.mark.parametrize("layers", [None, [3]], ids=["everywhere", "last stage"])
    @pytest.mark.parametrize("compute", ["float32", "bfloat16"])
    def test_bf16_with_zero1(self, compute: str, layers: list[int] | None, tmp_path: Path) -> None:
        fields = {} if layers is None else {"layers_to_transform": layers, "target_modules": ["q_proj"]}
        given = {"is_bf16": True, "form": {"bnb_4bit_compute_dtype": compute}, "adapter": fields}
        section = engines.section(slices=[7, 3, 6], verify="off")
        errors = rank_pool(2).run(train_quantized, folder=str(tmp_path), terapipe=section, **given)
        assert not engines.violations(errors, 1e-2)

    @pytest.mark.full
    @pytest.mark.parametrize("family", ["gpt2", "qwen2"])
    def test_transposed_weights_and_biases(self, family: str, tmp_path: Path) -> None:
        given = {"family": family, "terapipe": engines.section(slices=[7, 3, 6], schedule="zbv"), "is_stored": True}
        given["adapter"] = {"target_modules": ["c_attn", "c_proj"] if family == "gpt2" else "all-linear"}
        assert not engines.violations(rank_pool(2).run(train_quantized, folder=str(tmp_path), **given), 1e-5)

    def test_what_is_saved_is_read(self, tmp_path: Path) -> None:
        """By peft, by stages, by other parts, and a checkpoint brings its quantized weights; from any form of base."""
        for found in rank_pool(2).run(folders_of_adapters, folder=str(tmp_path)):
            assert found["files"] == ["adapter_config.json", "adapter_model.safetensors"] and found["base"]
            assert "adapters are not added to quantized weights" in found["merge"]
            errors = [found[name] for name in ("peft", "again", "other", "moved", "skeleton")]
            assert max(errors) <= 1e-6, found

    def test_what_is_refused(self, tmp_path: Path) -> None:
        """On all ranks, before anything is read."""
        texts = {
            "nothing trained": "train adapters, adapter=LoraConfig()",
            "tensor ranks": "tensor-parallel ranks cannot divide them",
            "in memory": "its weights are quantized in memory: give its folder",
            "two": "give it to skeleton",
            "dora": "LoraConfig(use_dora=True) is not served",
            "bias": "LoraConfig(bias='all') is not served",
            "8 bits": "its weights are quantized (load_in_8bit)",
        }
        for found in rank_pool(2).run(refusals, folder=str(tmp_path)):
            assert found.keys() == texts.keys()
            assert not [case for case, text in texts.items() if text not in found[case]], found
