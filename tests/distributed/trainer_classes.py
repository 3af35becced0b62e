"""Trainers of others, over stages: some only delegate, others compute losses of their own. Used inside the ranks."""

import re
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import torch
import torch.distributed as torch_dist
import trl
from accelerate.state import AcceleratorState
from transformers import DataCollatorForLanguageModeling, Seq2SeqTrainingArguments, Trainer, TrainingArguments
from transformers.trainer_pt_utils import LabelSmoother

from terapipe_ds.integrations.trainer import PipelineSFTTrainer, PipelineTrainerMixin
from tests.distributed import trainer_jobs
from tests.distributed.sft_jobs import tokenizer
from tests.distributed.sft_jobs import trainer_of as sft_trainer_of


class Delegating(Trainer):
    """Do as the Trainers of LLaMA-Factory and Axolotl: add nothing to the loss but a condition."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if self.args.label_smoothing_factor < 0:
            return torch.zeros(())
        return super().compute_loss(model, inputs, *args, **kwargs)

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss, logits, labels = super().prediction_step(model, inputs, *args, **kwargs)
        return loss, logits, labels


class Busy(Trainer):
    """Change batches, count and log in the methods that stages replace; read an entry of its own collator."""

    tokens = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.noted_metrics: dict[str, list[int]] = {"steps": []}
        super().__init__(*args, **kwargs)
        collate = self.data_collator
        self.data_collator = lambda rows: collate(rows) | {"rows": len(rows)}

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        assert model.training == self.model.training
        self.tokens += (
            inputs["input_ids"].numel() + inputs.pop("rows") + 1000 * model.training + model.config.vocab_size
        )
        labels = inputs["labels"].masked_fill(inputs["labels"] % 5 == 3, -100)
        return super().compute_loss(model, inputs | {"labels": labels}, *args, **kwargs)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any) -> Any:
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.noted_metrics["steps"].append(self.state.global_step)
        if self.state.global_step == 1:
            self.log({"tokens": self.tokens, "steps": len(self.noted_metrics["steps"])})
        return loss

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any) -> Any:
        loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        self.log({"sum": float(loss)})
        return loss, logits.argmax(-1), labels


class OwnCounts(Trainer):
    """Double the number of labels of every other batch, and leave the others to the mean over their own labels."""

    calls = 0

    def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None) -> Any:
        self.calls += 1
        count = 2 * num_items_in_batch if num_items_in_batch is not None and self.calls % 2 else None
        return super().compute_loss(model, inputs, return_outputs, count)


def compare_of_class(kind: type[Trainer], folder: str) -> dict[str, Any]:
    args = {"eval_strategy": "steps", "eval_steps": 3, "remove_unused_columns": False}
    return trainer_jobs.compare({"args": args, "metrics": "logits"}, folder, (kind, over_stages(kind)))


class TwoRates(Trainer):
    """Make two groups of parameters, and double the rates at each call. A stage may lack the parameters of a group."""

    def create_optimizer(self, *_: Any) -> Any:
        if self.optimizer is None:
            named = self.model.named_parameters()
            parts: dict[bool, list[Any]] = {True: [], False: []}
            for name, parameter in [next(named), *named]:
                parts["embed" in name].append(parameter)
            groups = [{"params": parts[True], "lr": 1e-3}, {"params": parts[False]}]
            self.optimizer = torch.optim.AdamW(groups, lr=self.args.learning_rate, eps=1e-4)
        for group in self.optimizer.param_groups:
            group["lr"] *= 2
        return self.optimizer


def compare_two_rates(folder: str, stage: int) -> dict[str, Any]:
    """Compare runs whose engine starts before the training, with a stage of ZeRO."""
    given = {"fp64": stage == 0, "ds": {"zero_optimization": {"stage": stage}}, "phases": ["evaluate", "train"]}
    over = type("TwoRates", (TwoRates, trainer_jobs.PipelineTrainer), {})
    return trainer_jobs.compare(given, folder, (TwoRates, over))


class ReadsLoss(Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        self.log({"mine": loss.item()})
        return loss


class ReadsLossOnOneRank(Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        if self.is_world_process_zero():
            self.log({"mine": loss.item()})
        return loss


class OwnLossInPlace(Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        loss *= 2
        return loss


class OwnContext(Trainer):
    def compute_loss_context_manager(self) -> Any:
        return torch.autocast("cpu")


class OwnLoss(Trainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return 2 * super().compute_loss(model, inputs, *args, **kwargs)


class OwnLossOverStages(trainer_jobs.PipelineTrainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return 2 * super().compute_loss(model, inputs, *args, **kwargs)


class LateLoss(Trainer):
    """Choose the loss after Trainer's constructor, as LLaMA-Factory's does for `use_dft_loss`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.compute_loss_func = lambda outputs, labels, num_items_in_batch=None: outputs["logits"].sum()


class LateSmoothing(Trainer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.label_smoother = LabelSmoother(epsilon=0.1)


class OwnStep(Trainer):
    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return self.compute_loss(model, inputs)


class ModelsLoss(Trainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return model(**inputs).loss


class LeavesOut(Trainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        is_last = self.accelerator.sync_gradients
        return torch.zeros(()) if is_last else super().training_step(*args, **kwargs)


def losses_of_their_own(folder: str) -> dict[str, str]:
    """Return the error of the first step, the same on all ranks, by the words that it must have; "" without one."""
    own_loss, no_weights = ".compute_loss is its own", "the model of this Trainer has no weights"
    kinds: dict[str, type[Trainer]] = {
        f"OwnLoss{own_loss}, and stages run Trainer's in slices": over_stages(OwnLoss),
        f"OwnLossOverStages{own_loss}": OwnLossOverStages,
        f"ReadsLoss{own_loss} (Tensor.item() cannot be called on meta tensors)": over_stages(ReadsLoss),
        f"on rank 0: ReadsLossOnOneRank{own_loss}": over_stages(ReadsLossOnOneRank),
        f"OwnLossInPlace{own_loss}": over_stages(OwnLossInPlace),
        no_weights: over_stages(OwnStep),
        f"{no_weights}: ": over_stages(ModelsLoss),
        "LeavesOut.training_step must call its parent's once": over_stages(LeavesOut),
        "": over_stages(Delegating),
    }
    return {words: trainer_jobs.refusal({}, folder, kind, train_one_of) for words, kind in kinds.items()}


def train_one_of(*given: Any) -> None:
    trainer_jobs.trainer_of(*given).train()


class OwnSave(Trainer):
    def save_model(self, *args: Any, **kwargs: Any) -> None:
        super().save_model(*args, **kwargs)


class GKDTrainer(trl.SFTTrainer):
    __module__ = "trl.experimental.gkd.gkd_trainer"


class ByPosition(Trainer):
    """Take the model and other things before the arguments, as TRL's GRPOTrainer does."""

    def __init__(self, model: Any, rewards: Any, args: Any = None, **kwargs: Any) -> None:
        super().__init__(model, args, **kwargs)


def over_stages(kind: type[Trainer]) -> type[Trainer]:
    return type(kind.__name__, (PipelineTrainerMixin, kind), {})


def of_trl(name: str) -> Any:
    """Return a function that makes a trainer of TRL over stages."""

    def make(_: Any, setting: Mapping[str, Any], folder: str, deepspeed: Any) -> Any:
        args = getattr(trl, f"{name}Config")(folder, deepspeed=deepspeed, use_cpu=True, report_to=[], bf16=False)
        return over_stages(getattr(trl, f"{name}Trainer"))(model=trainer_jobs.model_of(setting), args=args)

    return make


@mock.patch.dict("os.environ")  # 4.57 says there that models are compiled
def by_position(_: Any, setting: Mapping[str, Any], folder: str, deepspeed: Any) -> Any:
    args = trl.SFTConfig(folder, deepspeed=deepspeed, use_cpu=True, report_to=[], bf16=False, torch_compile=True)
    return over_stages(ByPosition)(trainer_jobs.model_of(setting), print, args)


def generating(_: Any, setting: Mapping[str, Any], folder: str, deepspeed: Any) -> Any:
    options = {"use_cpu": True, "report_to": [], "predict_with_generate": True}
    args = Seq2SeqTrainingArguments(folder, deepspeed=deepspeed, **options)
    return trainer_jobs.PipelineTrainer(model=trainer_jobs.model_of(setting), args=args)


def smoothing(*given: Any) -> Any:
    """Make a Trainer as in older versions of transformers."""
    with mock.patch.object(LabelSmoother, "__call__", lambda self, outputs, labels, shift_labels=False: None):
        return trainer_jobs.trainer_of(*given)


def on_cpus_of_accelerate(*given: Any) -> Any:
    with mock.patch.dict("os.environ", ACCELERATE_USE_CPU="true"):
        return trainer_jobs.trainer_of(*given)


def left_padded(_: Any, setting: Mapping[str, Any], folder: str, deepspeed: Any) -> Any:
    args = trl.SFTConfig(folder, deepspeed=deepspeed, use_cpu=True, report_to=[], bf16=False)
    texts = tokenizer()
    texts.padding_side = "left"
    collator = DataCollatorForLanguageModeling(texts, mlm=False)
    return trainer_jobs.PipelineTrainer(model=trainer_jobs.model_of(setting), args=args, data_collator=collator)


def beside_adapters(_: Any, setting: Mapping[str, Any], folder: str, deepspeed: Any) -> Any:
    model = peft.get_peft_model(trainer_jobs.model_of(setting), peft.LoraConfig(target_modules=["q_proj"]))
    model.get_base_model().model.norm.weight.requires_grad_(True)
    args = TrainingArguments(folder, deepspeed=deepspeed, use_cpu=True, report_to=[])
    return trainer_jobs.PipelineTrainer(model=model, args=args)


def refusals(folder: str) -> dict[str, str]:
    """Return the text of each refusal, the same on all ranks, by the words that it must have; "" without one."""

    def of_args(**args: Any) -> dict[str, Any]:
        return {"given": {"args": args}}

    def of_ds(**ds: Any) -> dict[str, Any]:
        return {"given": {"ds": ds}}

    whole = "Trainer: its loss compares whole sequences, or needs texts that the model generates"
    jobs: dict[str, dict[str, Any]] = {
        # each argument that is refused is in tests/unit/test_trainer_arguments.py
        "neftune_noise_alpha: NEFTune": of_args(neftune_noise_alpha=5),
        "optim=galore_adamw: it needs the whole model": of_args(optim="galore_adamw"),
        "zero_optimization.stage = 2 cannot be combined": of_ds(zero_optimization={"stage": 2}),
        "pipeline.stages = 3: give": of_ds(pipeline={"stages": 3}),
        "pipeline.stages = 2, tensor_parallel.autotp_size = 2: give": of_ds(tensor_parallel={"autotp_size": 2}),
        "pipeline = 'auto' cannot be combined": of_ds(pipeline="auto"),
        "terapipe.strategy = 'none.json': cannot read it": {"given": {"section": {"strategy": "none.json"}}},
        "did you mean terapipe.slices": {"given": {"section": {"slicess": 2}}},
        "compute_loss_func: stages compute": {"given": {}, "compute_loss_func": print},
        "model_init: stages are cut once": {"given": {}, "model_init": print},
        "optimizers: they hold parameters": {"given": {}, "optimizers": (print, None)},
        "OwnSave.save_model: the stages save": {"given": {}, "kind": over_stages(OwnSave)},
        "OwnContext.compute_loss_context_manager: DeepSpeed": {"given": {}, "kind": over_stages(OwnContext)},
        "Trainer.compute_loss_func: stages compute": {"given": {}, "kind": over_stages(LateLoss)},
        "label_smoother: stages smooth labels by": {"given": {}, "kind": over_stages(LateSmoothing)},
        "label_smoothing_factor: Trainer of transformers": {**of_args(label_smoothing_factor=0.1), "make": smoothing},
        "predict_with_generate: generation needs": {"given": {}, "make": generating},
        "where ACCELERATE_USE_CPU is set": {"given": {}, "make": on_cpus_of_accelerate},
        "padding on the left": {"given": {}, "make": left_padded},
        "model.norm.weight of the model are trained beside": {"given": {}, "make": beside_adapters},
        "torch_compile: set ": {"given": {}, "make": by_position},
        f"GKD{whole}": {"given": {}, "kind": over_stages(GKDTrainer), "make": sft_trainer_of},
        **{f"{name}{whole}": {"given": {}, "make": of_trl(name)} for name in ("DPO", "KTO", "GRPO", "Reward")},
    }
    delegating: dict[str, dict[str, Any]] = {"": {"given": {}, "kind": over_stages(Delegating)}}
    pissa = {"target_modules": ["q_proj"], "init_lora_weights": "pissa"}  # which peft cannot compute on a skeleton
    jobs["init_lora_weights 'pissa' changes"] = {
        "given": {"is_by_name": True, "lora": pissa}, "kind": PipelineSFTTrainer, "make": sft_trainer_of
    }  # fmt: skip
    return {words: trainer_jobs.refusal(folder=folder, **job) for words, job in {**jobs, **delegating}.items()}


class AxolotlTrainer(Delegating):
    """Stand in for Axolotl's."""


def train_by_plugin(page: str, folder: str) -> tuple[str, list[int], set[str]]:
    """Train with the plugin on a page of the docs. Stand-ins replace Axolotl, and call its methods in the same order.

    Return the name of its class, the logged steps, and the names of the files of weights that it saves.
    """
    code = next(block for block in _blocks(Path(page).read_text()) if "get_trainer_cls" in block)
    stand_ins: dict[str, Any] = {
        "axolotl.core.trainers": mock.Mock(AxolotlTrainer=AxolotlTrainer),
        "axolotl.integrations.base": mock.Mock(BasePlugin=object),
    }
    names: dict[str, Any] = {"__name__": "pipeline_plugin"}
    with mock.patch.dict("sys.modules", stand_ins):
        exec(code, names)
        plugin = names["PipelinePlugin"]()
        options: dict[str, Any] = {"rl": None, "reward_model": False, "load_in_4bit": False, "load_in_8bit": False}
        options |= {"max_steps": 2, "warmup_steps": 1, "warmup_ratio": None, "output_dir": f"{folder}/saved"}
        cfg = types.SimpleNamespace(**options)
        assert plugin.get_trainer_cls(types.SimpleNamespace(rl="dpo")) is None
        plugin.load_datasets(cfg)
        assert cfg.device_map == {"": "cpu"} and cfg.ddp is False
        kind = plugin.get_trainer_cls(cfg)
        args = plugin.get_training_args(cfg)
    setting = trainer_jobs.setting_of({"args": args})
    AcceleratorState._reset_state(True)
    trainer = trainer_jobs.trainer_of(kind, setting, folder, trainer_jobs.deepspeed_of(setting))
    plugin.post_trainer_create(cfg, trainer)
    trainer.train()
    plugin.post_train(cfg, trainer.model)
    if torch_dist.get_rank() == 0:
        trainer.model.save_pretrained(cfg.output_dir)
    plugin.post_train(cfg, trainer.model)
    steps = [log["step"] for log in trainer.state.log_history]
    return kind.__name__, steps, {path.name for path in Path(cfg.output_dir).glob("*.safetensors")}


def _blocks(page: str) -> Iterator[str]:
    yield from re.findall(r"```python\n(.*?)```", page, re.DOTALL)


def without_section(folder: str) -> tuple[bool, bool]:
    """Return whether the mixin changes nothing of a Trainer without an enabled section."""
    trainer = trainer_jobs.trainer_of(trainer_jobs.PipelineTrainer, trainer_jobs.setting_of({}), folder, None)
    return not hasattr(trainer, "_stages"), all(not parameter.is_meta for parameter in trainer.model.parameters())
