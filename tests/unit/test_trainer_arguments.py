"""Arguments of Trainers over stages, in one process."""

import contextlib
import copy
import dataclasses
import importlib
import json
import math
import os
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("accelerate", reason="needs the extra trl: pip install terapipe_ds[trl]")

from accelerate import DeepSpeedPlugin
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from terapipe_ds.config import TeraPipeConfigError
from terapipe_ds.costs.devices import device_card
from terapipe_ds.integrations.trainer import PipelineTrainerMixin, mixin
from terapipe_ds.integrations.trainer.refusals import (
    _REFUSED_ARGS,
    _of_args,
    _of_given,
    check_optimizer,
    outer_arguments,
)
from terapipe_ds.integrations.trainer.stages import Stages, enabled_config
from terapipe_ds.integrations.trainer.stages import config_of as stages_config_of
from terapipe_ds.integrations.trainer.token_loss import TokenLoss
from terapipe_ds.models.hugging_face import ModelRefusedError
from terapipe_ds.models.hugging_face.weights.quantized import quantize
from terapipe_ds.planner.cluster import Cluster
from terapipe_ds.planner.strategy import plan_strategy
from tests.hugging_face_families import IS_4, config_of


@pytest.fixture(autouse=True)
def _own_environment() -> Iterator[None]:
    """Arguments of 4.57 write their precision there, and ranks that start later would have it."""
    with mock.patch.dict(os.environ):
        yield


class OtherOrder(PipelineTrainerMixin, Trainer):
    def __init__(self, args: Any, model: Any, **kwargs: Any) -> None:
        super().__init__(model, args, **kwargs)


def test_a_class_may_take_its_arguments_in_another_order() -> None:
    """The mixin gets those of the classes after it."""
    given = outer_arguments(OtherOrder, PipelineTrainerMixin, ("model", "args"), {"callbacks": None})
    assert given == {"model": "model", "args": "args", "callbacks": None}


def without_start(kind: type, **fields: Any) -> Any:
    """Return an object whose initializer has not run."""
    made = object.__new__(kind)
    handler = types.SimpleNamespace(call_event=None)
    vars(made).update({"compute_loss_func": None, "label_smoother": None, "callback_handler": handler} | fields)
    return made


def test_quantization_is_given_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixin, "refused_on_all_ranks", contextlib.nullcontext)
    args = types.SimpleNamespace(model_init_kwargs={"quantization_config": {"load_in_4bit": True}})
    given = {"args": args, "model": "a/model", "quantization_config": {"load_in_4bit": True}}
    with pytest.raises(ModelRefusedError, match="it stands in model_init_kwargs too; give it once"):
        without_start(OtherOrder)._with_skeleton(given)


@pytest.mark.skipif(IS_4, reason="transformers 4.57 cannot quantize layer by layer")
def test_the_operations_of_4_bit_weights_count_once() -> None:
    """As in the model that is not quantized."""
    pytest.importorskip("bitsandbytes", reason="needs the extra qlora: pip install terapipe_ds[qlora]")
    with torch.device("meta"):
        plain, model = (AutoModelForCausalLM.from_config(config_of("llama", 2)) for _ in range(2))
    model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    quantize(model)
    ids = {"input_ids": torch.zeros(2, 5, dtype=torch.long)}
    counted = without_start(OtherOrder, model=model, _stages=types.SimpleNamespace()).floating_point_ops(ids)
    assert counted == 6 * 10 * plain.num_parameters(exclude_embeddings=True)
    assert model.is_loaded_in_4bit


def test_operations_count_on_the_first_stage_however_a_class_counts_them() -> None:
    for is_first in (True, False):
        state, args = types.SimpleNamespace(total_flos=0), types.SimpleNamespace(parallel_mode=None)
        stages = types.SimpleNamespace(is_first=is_first)
        without_start(OtherOrder, current_flos=7.0, state=state, args=args, _stages=stages).store_flos()
        assert state.total_flos == 7 * is_first


def test_a_training_forgets_the_sums_of_a_failed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trainer, "_inner_training_loop", lambda self: None)
    loss = TokenLoss(keeps_sums=True)
    loss._sums[0].append(torch.ones(3))
    monkeypatch.setattr(mixin, "refused_on_all_ranks", contextlib.nullcontext)
    monkeypatch.setattr(OtherOrder, "_own_parameters", lambda self: [])
    grid = types.SimpleNamespace(get_pipe_parallel_world_size=lambda: 1, loaders_of_replicas=contextlib.nullcontext)
    stages = without_start(Stages, _loss=loss, module=types.SimpleNamespace(mpu=lambda: grid))
    fields = {"_stages": stages, "_waiting": [(1, 2)], "_renew_config": lambda: None, "accelerator": grid}
    without_start(OtherOrder, model=torch.nn.Module(), **fields)._inner_training_loop()
    assert loss.take_sums() == {} and not fields["_waiting"]


@pytest.mark.parametrize("rank", ["0", "1"])
def test_several_ranks_without_stages_are_told(rank: str, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """A user who forgot `deepspeed=` would train data-parallel without a word."""
    kind = type("Without", (PipelineTrainerMixin, type("Base", (Trainer,), {"__init__": lambda self, **_: None})), {})
    kind(args=None)
    assert caplog.text == ""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", rank)
    kind(args=None)
    assert ("no stages" in caplog.text) == (rank == "0")
    caplog.clear()
    kind(args=types.SimpleNamespace(deepspeed={"terapipe": {"enabled": False}}))  # on purpose
    assert caplog.text == ""


@pytest.mark.parametrize("sizes", [{}, {"gradient_accumulation_steps": 2}, {"gradient_accumulation_steps": "auto"}])
def test_a_file_of_accelerate_launch_may_leave_out_sizes(
    sizes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"zero_optimization": {"stage": 0}, "terapipe": {"enabled": True}, **sizes}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(path))
    plugin = DeepSpeedPlugin()
    plugin.set_mixed_precision("bf16")  # `accelerate launch --mixed_precision`
    raw = stages_config_of(types.SimpleNamespace(deepspeed=None, deepspeed_plugin=plugin))  # type: ignore[arg-type]
    assert {key: raw[key] for key in raw if key in {*config, "gradient_accumulation_steps"}} == config
    assert raw["bf16"] == {"enabled": True}
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", "gone.json")  # the script has changed its folder since
    again = stages_config_of(types.SimpleNamespace(deepspeed=None, deepspeed_plugin=plugin))  # type: ignore[arg-type]
    assert raw.items() <= again.items()


@pytest.mark.parametrize("of_json", [{}, {"bf16": {"enabled": "auto"}}, {"bf16": {"enabled": False}}], ids=str)
@pytest.mark.parametrize("launched", ["no", "bf16", "fp16"])
def test_accelerate_launch_sets_a_precision_as_without_stages(
    launched: str, of_json: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched)
    config = {"zero_optimization": {"stage": 0}, "train_micro_batch_size_per_gpu": "auto", **of_json}
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], deepspeed=copy.deepcopy(config))
    stages = without_start(Stages, _raw={"terapipe": {"enabled": True}, **config}, section={"enabled": True})
    found = stages.new_config(args).config
    args.deepspeed_plugin.set_mixed_precision(launched)  # type: ignore[attr-defined]
    expected = args.deepspeed_plugin.deepspeed_config  # type: ignore[attr-defined]
    assert all(found[key]["enabled"] == expected[key]["enabled"] for key in ("bf16", "fp16"))


@pytest.mark.parametrize("norm", [0.0, None])
def test_a_norm_of_0_or_none_clips_nothing(norm: float | None, tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], max_grad_norm=norm)
    stages = without_start(Stages, _raw={"terapipe": {"enabled": True}}, section={"enabled": True})
    assert stages.new_config(args).config["gradient_clipping"] == math.inf


def test_sections_that_are_null_are_absent() -> None:
    section = {"terapipe": {"enabled": True, "slices": 2}}
    null = dict.fromkeys(("pipeline", "tensor_parallel", "sequence_parallel_size", "gradient_clipping"))
    config = enabled_config(section | null)
    assert config == section
    with mock.patch("torch.distributed.get_world_size", lambda: 3):
        topology = without_start(Stages, _raw=config, section=config["terapipe"])._wanted_topology()
    assert (topology.axes, topology.dims) == (["pipe", "data"], [3, 1])


def test_a_strategy_has_the_number_of_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(device_card("h200"), 1, 4)
    strategy = plan_strategy("gpt3-1b", cluster, global_batch_size=8, sequence_length=1024, stages=2)
    path = tmp_path / "strategy.json"
    path.write_text(strategy.to_json())
    monkeypatch.setenv("HOME", str(tmp_path))
    section = {"strategy": "~/strategy.json"}
    for count in ("auto", 2):
        stages = without_start(Stages, _raw={"pipeline": {"stages": count}}, section=section)
        assert stages._wanted_topology().get_dim("pipe") == 2
    with pytest.raises(TeraPipeConfigError, match=r"pipeline.stages = 4, .* has 2: leave out pipeline.stages"):
        without_start(Stages, _raw={"pipeline": {"stages": 4}}, section=section)._wanted_topology()


# All arguments of Trainer and SFTTrainer, so that none is ignored. These mean with stages what they mean without.
SAME = """
output_dir save_strategy save_steps save_total_limit save_only_model push_to_hub hub_token hub_private_repo hub_model_id
hub_strategy hub_always_push hub_revision load_best_model_at_end metric_for_best_model greater_is_better
ignore_data_skip restore_callback_states_from_checkpoint
per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps
optim optim_args optim_target_modules weight_decay adam_beta1 adam_beta2 adam_epsilon gradient_accumulation_steps
max_grad_norm label_smoothing_factor bf16 fp16 tf32 use_cpu use_cache deepspeed full_determinism seed data_seed
gradient_checkpointing gradient_checkpointing_kwargs activation_checkpointing activation_checkpointing_kwargs
logging_strategy logging_steps logging_first_step log_on_each_node logging_nan_inf_filter log_level log_level_replica
include_num_input_tokens_seen disable_tqdm report_to run_name project trackio_space_id trackio_bucket_id
trackio_static_space_id skip_memory_metrics
eval_strategy eval_steps eval_delay per_device_eval_batch_size prediction_loss_only eval_on_start eval_do_concat_batches
eval_accumulation_steps include_for_metrics batch_eval_metrics label_names
accelerator_config dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers
dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order remove_unused_columns
train_sampling_strategy length_column_name
model_init_kwargs trust_remote_code router_aux_loss_coef chat_template_path dataset_text_field dataset_kwargs
dataset_num_proc eos_token pad_token max_length truncation_mode shuffle_dataset packing packing_strategy padding_free
pad_to_multiple_of eval_packing completion_only_loss assistant_only_loss loss_type
"""
WITHOUT_EFFECT = {
    "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph": "DeepSpeed reduces",
    "ddp_backend ddp_timeout local_rank": "the processes are connected before the Trainer is made",
    "fsdp fsdp_config": "Trainer refuses them beside DeepSpeed",
    "torch_compile_backend torch_compile_mode": "they set torch_compile, which is refused",
    "liger_kernel_config": "it needs use_liger_kernel, which is refused",
    "do_train do_eval do_predict resume_from_checkpoint": "scripts read them, and Trainer does not",
}


@pytest.mark.skipif(IS_4, reason="the arguments of transformers 5")
def test_each_argument_is_served_or_refused_by_name() -> None:
    kinds = [TrainingArguments]
    with contextlib.suppress(ImportError):
        kinds.append(importlib.import_module("trl").SFTConfig)
    served = [*SAME.split(), *" ".join(WITHOUT_EFFECT).split()]
    for kind in kinds:
        args = kind("folder", use_cpu=True, report_to=[], bf16=False)
        names = {field.name for field in dataclasses.fields(kind)}
        assert not names - {*served, *_REFUSED_ARGS} and not {*served} & {*_REFUSED_ARGS}
        assert not list(_of_args(args, {}))
        for name in names & {*_REFUSED_ARGS}:
            kept = getattr(args, name)
            setattr(args, name, not kept)
            assert [problem.split(": ")[0] for problem in _of_args(args, {})] == [name]
            setattr(args, name, kept)


@pytest.mark.parametrize(("args", "ds_config", "problem"), [
    ({"label_names": ["labels"]}, {}, ""),
    ({"label_names": []}, {}, "label_names=[]: "),
    ({"optim": "schedule_free_adamw"}, {}, "optim=schedule_free_adamw: "),
    ({"optim": "adafactor"}, {"zero_optimization": {"stage": 0}}, ""),
    ({"optim": "adafactor"}, {"zero_optimization": {"stage": 1}}, "optim=adafactor: "),
    ({"optim": "stable_adamw"}, {"zero_optimization": {"stage": 1}}, "optim=stable_adamw: "),
    ({"optim": "adafactor", "bf16": True}, {}, "optim=adafactor: "),
    ({"gradient_checkpointing_kwargs": {"use_reentrant": False, "selective": False}}, {}, ""),
    ({"gradient_checkpointing_kwargs": {"selective": True}}, {}, "activation_checkpointing_kwargs or"),
    ({"gradient_checkpointing_kwargs": {"preserve_rng_state": False}}, {}, "activation_checkpointing_kwargs or"),
])  # fmt: skip
def test_values_that_stages_cannot_serve(args: dict[str, Any], ds_config: dict[str, Any], problem: str) -> None:
    problems = list(_of_args(TrainingArguments("folder", use_cpu=True, report_to=[], **args), ds_config))
    assert "; ".join(problems).startswith(problem) and len(problems) == bool(problem)


@pytest.mark.parametrize(("name", "served", "refused"), [
    ("MIXED_PRECISION", "bf16", "fp8"), ("DYNAMO_BACKEND", "NO", "INDUCTOR"),
    ("USE_PARALLELISM_CONFIG", "false", "True"),
    ("USE_PARALLELISM_CONFIG", "0", "true"),  # Trainer would divide the number of labels by its ranks
])  # fmt: skip
def test_variables_of_accelerate_launch_that_stages_cannot_serve(
    name: str, served: str, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = TrainingArguments("folder", use_cpu=True, report_to=[])
    for value, count in ((served, 0), (refused, 1)):
        monkeypatch.setenv(f"ACCELERATE_{name}", value)
        problems = list(_of_args(args, {}))
        assert [problem.split(" of accelerate: ")[0] for problem in problems] == [f"ACCELERATE_{name}={value}"] * count


def test_a_class_of_arguments_may_have_other_defaults() -> None:
    @dataclasses.dataclass
    class Noisy(TrainingArguments):
        neftune_noise_alpha: float | None = 5.0

    [problem] = _of_args(Noisy("folder", use_cpu=True, report_to=[]), {})
    assert problem.startswith("neftune_noise_alpha: ")


def test_a_template_that_resizes_needs_a_model_in_memory() -> None:
    for template, model, count in (("a/model", "a/model", 1), ("a.jinja", "a/model", 0), ("a/model", object(), 0)):
        args = types.SimpleNamespace(chat_template_path=template)
        problems = list(_of_given({"args": args, "model": model}))
        assert len(problems) == count and "; ".join(problems).startswith("chat_template_path=a/model: " * count)


def test_code_of_a_model_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixin, "refused_on_all_ranks", contextlib.nullcontext)
    monkeypatch.setattr(mixin, "is_sft", lambda kind: True)
    args = types.SimpleNamespace(model_init_kwargs=None, trust_remote_code=True)
    with pytest.raises(TypeError, match="trust_remote_code is no argument .* code from a hub is not run"):
        without_start(OtherOrder)._with_skeleton({"args": args, "model": "a/model"})


def test_another_training_schedules_the_optimizer_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixin, "DeepSpeedOptimizerWrapper", lambda optimizer: optimizer)  # it needs an accelerator
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=1.0)
    stages = without_start(Stages, engine=types.SimpleNamespace(optimizer=optimizer))
    trainer = without_start(OtherOrder, _stages=stages, optimizer=None)
    torch.optim.lr_scheduler.LambdaLR(trainer.create_optimizer(), lambda step: 0.5)
    assert optimizer.param_groups[0]["lr"] == 0.5


# training and evaluation have run on all ranks
OF_STEP: dict[str, Any] = {
    "model_accepts_loss_kwargs": True, "_prepare_inputs": dict, "_tried": frozenset({True, False}),
    "_stages": types.SimpleNamespace(evaluate=lambda *_: (torch.zeros(()), None), replicas=2),
}  # fmt: skip


class OwnLossLater(PipelineTrainerMixin, Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return torch.zeros(())


def test_a_step_refuses_a_loss_of_its_own_and_other_weights_of_its_labels() -> None:
    own = OwnLossLater, 3, None, "compute_loss is its own, and stages run Trainer's in slices: let it return what"
    for kind, count, is_scaled, text in (
        own, (OtherOrder, None, None, "batch=None ask"), (OtherOrder, 3, False, "ga=False or num"),
    ):  # fmt: skip
        fields: dict[str, Any] = {**OF_STEP, "loss_is_scaled_for_ga": is_scaled}
        trainer = without_start(kind, **fields, model=torch.nn.Module())
        with pytest.raises(ModelRefusedError, match=text):
            trainer._train_on(trainer.model, {"labels": torch.ones(1, 2)}, count)


class AddsLabels(PipelineTrainerMixin, Trainer):
    """Its loss is a tuple."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        labels = torch.ones_like(inputs["input_ids"])
        return super().compute_loss(model=model, inputs={**inputs, "labels": labels}, **kwargs), None


def test_a_compute_loss_may_add_labels_and_return_a_tuple() -> None:
    trainer, ids = without_start(AddsLabels, **OF_STEP, model=torch.nn.Module()), torch.zeros(1, 2)
    batch, divisor = trainer._for_loss(trainer.model, {"input_ids": ids})
    assert batch["labels"].sum() == 2 and divisor == 2.0  # one label per replica has a token before it
    with pytest.raises(ModelRefusedError, match="num_items_in_batch=None ask"):  # Trainer has counted no labels
        trainer._train_on(trainer.model, {"input_ids": ids}, None)


def test_a_batch_without_labels_has_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Trainer, whose logging_nan_inf_filter leaves it out of the mean of an evaluation."""
    args = types.SimpleNamespace(device="cpu")
    monkeypatch.setattr(
        OtherOrder, "_get_num_items_in_batch", lambda self, batches, _: batches[0]["labels"].gt(0).sum()
    )
    for labels in ([-100, -100, -100], [-100, 1, 2]):
        trainer = without_start(OtherOrder, args=args, **OF_STEP, model=torch.nn.Module())
        is_nan = trainer.prediction_step(None, {"labels": torch.tensor([labels])}, True)[0].isnan()
        assert bool(is_nan) == (max(labels) < 0)


def test_another_training_refuses_another_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainer would begin anew with it, and the engine keeps the first one."""
    monkeypatch.setattr(OtherOrder, "_own_parameters", lambda self: [])
    first, other = (torch.optim.SGD(torch.nn.Linear(2, 2).parameters()) for _ in range(2))
    engine = types.SimpleNamespace(optimizer=types.SimpleNamespace(), basic_optimizer=first)
    stages = types.SimpleNamespace(engine=engine, module=torch.nn.Module())
    trainer = without_start(OtherOrder, model=torch.nn.Module(), _stages=stages)
    assert trainer._make_optimizer(lambda: first) is first
    trainer._made = None
    with pytest.raises(ModelRefusedError, match="let it return self.optimizer where that is not None"):
        trainer._make_optimizer(lambda: other)


def test_weights_are_frozen_before_the_trainer_has_stages() -> None:
    model = torch.nn.Linear(2, 2, device="meta")
    trainer = without_start(OtherOrder, _given=[(name, each, True) for name, each in model.named_parameters()])
    assert trainer._check_unchanged() == []
    model.bias.requires_grad_(False)
    with pytest.raises(ModelRefusedError, match="requires_grad of bias has changed since the Trainer was built"):
        trainer._check_unchanged()


class HasOtherWeightsInEvaluation(torch.optim.SGD):
    def train(self) -> None:
        pass


@pytest.mark.parametrize(("kind", "config", "problem"), [
    (torch.optim.SGD, {}, ""),
    (torch.optim.Adafactor, {"zero_optimization": {"stage": 0}, "bf16": {"enabled": "auto"}}, ""),
    (torch.optim.Adafactor, {"zero_optimization": {"stage": 1}}, "the optimizer Adafactor looks at whole weights"),
    (torch.optim.Adafactor, {"bf16": {"enabled": True}}, "the optimizer Adafactor looks at whole weights"),
    (HasOtherWeightsInEvaluation, {}, "or has other weights in evaluation"),
])  # fmt: skip
def test_stages_serve_the_optimizer_of_a_class(kind: Any, config: dict[str, Any], problem: str) -> None:
    """ZeRO flattens weights, and Adafactor of flat ones is another: weights differed by half from those of Trainer."""
    stage = torch.nn.Linear(2, 2, bias=False)
    with pytest.raises(ModelRefusedError, match=problem) if problem else contextlib.nullcontext():
        check_optimizer(kind(stage.parameters(), lr=0.1), stage, config)


@pytest.mark.parametrize("device", ["meta", "cpu"])  # trainer.model's, or kept from before the Trainer was made
def test_an_optimizer_has_the_weights_of_the_stages(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("terapipe_ds.integrations.trainer.stages.lay_out", lambda module, config: None)
    stages = without_start(Stages, _raw={}, module=torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2, device=device).parameters())
    with pytest.raises(ModelRefusedError, match=r"super\(\).create_optimizer\(\), and give no \"params\""):
        stages.start_engine({}, optimizer)


@pytest.mark.parametrize(("params", "problem"), [
    ({"cycle_min_lr": "auto"}, r'scheduler.params.cycle_min_lr = "auto": only'),  # Trainer does not fill it in
    ({"warmup_num_steps": "10"}, "scheduler.params.warmup_num_steps = '10': text"),
])  # fmt: skip
def test_a_scheduler_has_numbers(params: dict[str, str], problem: str) -> None:
    with pytest.raises(TeraPipeConfigError, match=problem):
        without_start(Stages).own_scheduler({"scheduler": {"type": "WarmupLR", "params": params}})
