"""Train with transformers' Trainer in one process, and over stages; compare. Runs inside the ranks."""

import contextlib
import dataclasses
import errno
import functools
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as torch_dist
import torch.nn.functional as F
import transformers
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from torch.utils.data import IterableDataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import terapipe_ds
from terapipe_ds.integrations.trainer import PipelineTrainer, stages
from terapipe_ds.integrations.trainer.mixin import PipelineAccelerator
from terapipe_ds.integrations.trainer.stages import Stages
from terapipe_ds.models.hugging_face.refusals import gathered
from tests.distributed import engines
from tests.distributed.checkpoint_states import states_of
from tests.unit.models.hugging_face.sliced_model import in_fp64

ROWS, LENGTH, VOCABULARY = 14, 16, 48  # two steps of three micro-batches and a shorter one are an epoch
_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE")
_TIMES = ("runtime", "per_second", "preparation_time")
_EVENTS = [name for name in dir(TrainerCallback) if name.startswith("on_")]


def model_of(setting: Mapping[str, Any], seed: int = 3) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    options = {"num_hidden_layers": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 64, **setting["model"]}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **options))
    return model.double() if setting["fp64"] else model


def rows_of(number: int = ROWS, blank: int = 0) -> list[dict[str, list[int]]]:
    """Return texts of different lengths; some tokens of each are no labels, and all tokens of the first `blank`."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for _ in range(number):
        length = int(torch.randint(5, LENGTH + 1, (1,), generator=generator))
        ids = torch.randint(2, VOCABULARY, (length,), generator=generator).tolist()
        prompt = int(torch.randint(0, length - 2, (1,), generator=generator)) if len(rows) >= blank else length
        rows.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]})
    return rows


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    def padded(name: str, value: int) -> torch.Tensor:
        return torch.tensor([row[name] + [value] * (LENGTH - len(row[name])) for row in rows])

    ids = padded("input_ids", 0)
    return {"input_ids": ids, "labels": padded("labels", -100), "attention_mask": (ids > 0).long()}


def packed(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Join texts in one row, as Axolotl does: the last token of a text learns the first one of the next text."""
    ids = torch.tensor([[each for row in rows for each in row["input_ids"]]])
    position_ids = torch.tensor([[place for row in rows for place in range(len(row["input_ids"]))]])
    return {"input_ids": ids, "labels": ids.clone(), "position_ids": position_ids}


class Stream(IterableDataset):
    """Hand out rows; with `has_one_reader` only to rank 0."""

    def __init__(self, num_rows: int, has_one_reader: bool) -> None:
        self._num_rows, self._has_one_reader = num_rows, has_one_reader

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        for row in rows_of(self._num_rows):
            assert not self._has_one_reader or torch_dist.get_rank() == 0
            yield row


class Recorder(TrainerCallback):
    """Write down each event with the step, and the keys of logs."""

    def __init__(self) -> None:
        self.events: list[Any] = []


def _noted(name: str) -> Callable[..., None]:
    def note(self: Recorder, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append((name, state.global_step, state.epoch, sorted(kwargs.get("logs", {}))))

    return note


for _name in _EVENTS:
    setattr(Recorder, _name, _noted(_name))


def metrics_of(prediction: Any) -> dict[str, float]:
    """Return the share of labels that are the largest logit; predictions are these, or logits."""
    top = prediction.predictions
    top = top.argmax(-1) if top.ndim == 3 else top
    counts = prediction.label_ids[:, 1:] != -100
    return {"accuracy": float(((top[:, :-1] == prediction.label_ids[:, 1:]) & counts).sum() / counts.sum())}


def largest(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1)


def exact_loss(
    logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, num_items_in_batch: Any = None, **_: Any
) -> torch.Tensor:
    """Be the causal loss of transformers without its cast to fp32."""
    shifted = F.pad(labels, (0, 1), value=-100)[:, 1:].flatten()
    total = F.cross_entropy(logits.flatten(0, 1), shifted, ignore_index=-100, reduction="sum")
    return total / ((shifted != -100).sum() if num_items_in_batch is None else num_items_in_batch)


def trainer_of(
    kind: type[Trainer], setting: Mapping[str, Any], folder: str, deepspeed: Any, seed: int = 3, **of_trainer: Any
) -> Trainer:
    model = model_of(setting, seed)
    if setting["fp64"] and kind is Trainer:
        model.loss_function = exact_loss
    options = {
        "per_device_train_batch_size": 2, "per_device_eval_batch_size": 4, "gradient_accumulation_steps": 3,
        "num_train_epochs": 2, "logging_steps": 1, "save_strategy": "no", "report_to": [], "use_cpu": True,
        "disable_tqdm": True, "learning_rate": 1e-2, "max_grad_norm": 0.0, "weight_decay": 0.1,
        "adam_epsilon": 1e-4, **setting["args"],
    }  # fmt: skip
    args = TrainingArguments(folder, deepspeed=deepspeed, **options)
    rows: Any = rows_of(setting["rows"], setting["blank"])
    if setting["iterable"]:
        rows = Stream(setting["rows"], setting["iterable"] == "by rank 0")
    given: dict[str, Any] = {"train_dataset": rows, "data_collator": packed if setting["packed"] else collate}
    given["eval_dataset"] = rows if setting["iterable"] else rows_of(8)
    if setting["metrics"]:
        given |= {"compute_metrics": metrics_of}
    if setting["metrics"] == "largest":
        given |= {"preprocess_logits_for_metrics": largest}
    return kind(model=model, args=args, callbacks=[Recorder()], **given, **of_trainer)


def lose_the_last(folder: str, wanted: bool) -> None:
    """Remove the checkpoint of the most steps if `wanted`: then a resumed run skips batches."""
    if wanted:
        torch_dist.barrier()
        if torch_dist.get_rank() == 0:
            shutil.rmtree(str(get_last_checkpoint(folder)))
        torch_dist.barrier()


@mock.patch.dict(os.environ)  # 4.57 sets a precision there, which the next Trainer would take
def play(
    kind: type[Trainer], setting: Mapping[str, Any], folder: str, deepspeed: Any, make: Callable[..., Trainer]
) -> dict[str, Any]:
    """Run the phases of a setting; return what a user sees of them."""
    AcceleratorState._reset_state(True)
    trainer = make(kind, setting, folder, deepspeed)
    found: dict[str, Any] = {"results": []}
    for phase in setting["phases"]:
        if phase in (
            "resume",
            "resume earlier",
        ):  # in a Trainer of another model, which must get the weights of the checkpoint
            lose_the_last(folder, wanted=phase == "resume earlier")
            trainer = make(kind, setting, folder, deepspeed, seed=4)
            found["results"].append(trainer.train(resume_from_checkpoint=True).metrics)
        elif phase == "train":
            found["results"].append(trainer.train().metrics)
        elif phase == "other rate":
            trainer.args.learning_rate, trainer.args.weight_decay = 1e-4, 0.5
        elif phase == "predict":
            predicted = trainer.predict(rows_of(5))
            found["results"].append(predicted.metrics)
            counts = predicted.label_ids != -100  # padding is a token like others here, and nobody reads its logits
            found["predictions"] = np.where(counts[..., None], predicted.predictions, 0.0)
        elif phase == "save":
            trainer.save_model(f"{folder}/saved")
        else:
            found["results"].append(trainer.evaluate())
    found["results"] = [_untimed(each) for each in found["results"]]
    found["logs"] = [_untimed(each) for each in trainer.state.log_history]
    recorder = next(each for each in trainer.callback_handler.callbacks if isinstance(each, Recorder))
    found["events"] = [(*event[:3], [key for key in event[3] if not _is_time(key)]) for event in recorder.events]
    found["best"] = trainer.state.best_metric
    return found | {"trainer": trainer}


def _is_time(key: str) -> bool:
    return any(part in key for part in _TIMES)


def _untimed(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if not _is_time(key)}


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Let Trainer see a process that no launcher has started."""
    with mock.patch.dict(os.environ):
        for name in [name for name in os.environ if name in _LAUNCHER or name.startswith("ACCELERATE_")]:
            del os.environ[name]
        AcceleratorState._reset_state(True)
        yield
    AcceleratorState._reset_state(True)


def setting_of(given: Mapping[str, Any]) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "args": {}, "ds": {}, "section": {}, "model": {}, "fp64": False, "iterable": False, "metrics": "",
        "phases": ["train"], "one": {}, "rows": ROWS, "blank": 0, "packed": False,
    }  # fmt: skip
    return defaults | dict(given)


def deepspeed_of(setting: Mapping[str, Any]) -> dict[str, Any]:
    section = {"enabled": True, "slices": [7, 3, 6], "verify": "off", **setting["section"]}
    return {"zero_optimization": {"stage": 0}, "pipeline": {"stages": 2}, "terapipe": section, **setting["ds"]}


Kinds = tuple[type[Trainer], type[Trainer]]


def compare(
    given: Mapping[str, Any],
    folder: str,
    kinds: Kinds = (Trainer, PipelineTrainer),
    make: Callable[..., Trainer] = trainer_of,
) -> dict[str, Any]:
    """Return how the pipeline's run differs from the Trainer's in one process."""
    setting = setting_of(given)
    with in_fp64() if setting["fp64"] else contextlib.nullcontext():
        return _compare(setting, folder, kinds, make)


_start = Stages.start_engine


def _start_in_fp64(self: Stages, *args: Any) -> None:
    _start(self, *args)
    engines.reduce_in_fp64(self.engine)


def _compare(setting: Mapping[str, Any], folder: str, kinds: Kinds, make: Callable[..., Trainer]) -> dict[str, Any]:
    expected = None
    if torch_dist.get_rank() == 0:
        with alone():
            in_one = {**setting, "args": {**setting["args"], **setting["one"]}}
            expected = play(kinds[0], in_one, f"{folder}/one", None, make)
            model = expected.pop("trainer").model
            expected["weights"] = {_plain(name): value.numpy() for name, value in model.state_dict().items()}
    torch_dist.barrier()
    with mock.patch.object(Stages, "start_engine", _start_in_fp64) if setting["fp64"] else contextlib.nullcontext():
        staged = play(kinds[1], setting, f"{folder}/stages", deepspeed_of(setting), make)
    trainer = staged.pop("trainer")
    staged["weights"] = weights_of(trainer._stages.module)
    if trainer._stages.module.autotp_size > 1:  # a rank has shares of them
        trainer.save_model(f"{folder}/whole")
        torch_dist.barrier()
        saved = [load_file(path) for path in Path(folder, "whole").glob("*.safetensors")]
        staged["weights"] = {_plain(name): each.numpy() for one in saved for name, each in one.items()}
    everyone = gathered((staged["logs"], staged["results"], staged["events"]))
    trainer._stages.engine.destroy()
    if expected is None:
        return {}
    same = all(repr(each[:2]) == repr(everyone[0][:2]) for each in everyone)
    for run in (expected, staged):
        run["of_steps"] = bool(setting["one"])
    return differences(expected, staged) | {"ranks": same, "files": files(folder)}


def _array(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach()
    return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()


def weights_of(module: Any) -> dict[str, np.ndarray]:
    """Return the weights of all stages by their names in the model."""
    names = module.checkpoint_names().items()
    own = {name: _array(module.get_parameter(local)) for local, name in names}
    return {name: value for each in gathered(own) for name, value in each.items()}


def play_alone(given: Mapping[str, Any], folder: str, kind: type[Trainer]) -> dict[str, Any]:
    """Run a setting under DeepSpeed, over the stages that there are, or without any."""
    setting = setting_of(given)
    found = play(kind, setting, folder, {key: value for key, value in deepspeed_of(setting).items()
                                         if kind is PipelineTrainer or key not in ("terapipe", "pipeline")},
                 trainer_of)  # fmt: skip
    trainer = found.pop("trainer")
    if kind is PipelineTrainer:
        return found | {"weights": weights_of(trainer._stages.module)}
    return found | {"weights": {name: _array(each) for name, each in trainer.model.state_dict().items()}}


@mock.patch.dict(os.environ)
def resumed_in_16_bits(kind: str, folder: str) -> list[dict[str, Any]]:
    """Return what a run without interruption and a resumed one have: weights and moments, as DeepSpeed gives them.

    The JSON does not name a stage of ZeRO. The newest checkpoint is not whole, as after a kill; the one before is.
    """
    setting, found = setting_of({"args": {kind: True, "save_strategy": "steps", "save_steps": 2, "max_steps": 4}}), []
    config = {**deepspeed_of(setting), "zero_optimization": {}}
    for seed, resume in ((3, None), (4, True)):
        AcceleratorState._reset_state(True)
        trainer = trainer_of(PipelineTrainer, setting, folder, config, seed)
        trainer.train(resume_from_checkpoint=resume)
        found.append(states_of(trainer._stages.engine))
        trainer._stages.engine.destroy()
        torch_dist.barrier()
        Path(folder, "checkpoint-4", "trainer_state.json").write_text('{"epoch": ')
    return found


def _plain(name: str) -> str:
    return name.removeprefix("base_model.model.")


def differences(expected: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    weights = [relative(found["weights"][name], value) for name, value in expected["weights"].items()
               if name in found["weights"]]  # fmt: skip
    return {
        "weights": max(weights),
        "missing": sorted(set(expected["weights"]) - set(found["weights"]) - {"lm_head.weight"}),  # which may be tied
        "logs": _largest_difference(expected["logs"], found["logs"]),
        "results": _largest_difference(expected["results"], found["results"]),
        "predictions": relative(found.get("predictions", 0.0), expected.get("predictions", 0.0)),
        "best": _largest_difference([{"": expected["best"]}], [{"": found["best"]}]),
        "events": [pair for pair in zip(*map(_of_steps, (expected, found)), strict=True) if pair[0] != pair[1]],
    }


def _of_steps(run: Mapping[str, Any]) -> list[Any]:
    """Return all events, or only events of whole steps if the runs have other numbers of micro-batches."""
    return [event for event in run["events"] if not run.get("of_steps") or event[0] != "on_substep_end"]


def relative(value: Any, expected: Any) -> float:
    expected = np.asarray(expected)
    return float(np.abs(np.asarray(value) - expected).max() / max(float(np.abs(expected).max()), 1e-30))


def _largest_difference(expected: list[dict[str, Any]], found: list[dict[str, Any]]) -> float:
    """Return the largest relative difference of numbers; infinity where keys differ."""
    if [sorted(each) for each in expected] != [sorted(each) for each in found]:
        print("keys differ", expected, found)
        return float("inf")
    pairs = [(one[key], other[key]) for one, other in zip(expected, found, strict=True) for key in one]
    return max([0.0, *(abs(a - b) / max(abs(a), 1e-6) for a, b in pairs if a is not None or b is not None)])


def files(folder: str) -> list[str]:
    """Return the config files in the Trainer's folders that differ over stages, and the model cards missing there."""
    one = Path(folder, "one")
    other = Path(folder, "stages")
    paths = [path.relative_to(one) for path in one.rglob("*config.json")] if one.is_dir() else []
    different = [str(path) for path in paths if not (other / path).is_file()
                 or (other / path).read_text() != (one / path).read_text()]  # fmt: skip
    cards = [str(path.relative_to(one)) for path in one.rglob("README.md")]  # they hold the folder's name
    shutil.rmtree(one, ignore_errors=True)
    return different + [card for card in cards if not (other / card).is_file()]


def mean_of_step() -> list[float]:
    """Return the errors of loss and weights of a step on two replicas, against a plain loop; labels weigh alike."""
    with in_fp64():
        model, whole = (model_of(setting_of({"fp64": True})) for _ in range(2))
        batches = [collate(rows_of(8)[start : start + 2]) for start in range(0, 8, 2)]
        total = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
        loss = sum(exact_loss(whole(batch["input_ids"], batch["attention_mask"]).logits, batch["labels"], 0, total)
                   for batch in batches)  # fmt: skip
        loss.backward()
        with torch.no_grad():
            for parameter in whole.parameters():
                parameter -= 0.1 * parameter.grad
        module = terapipe_ds.from_pretrained(model, num_stages=2)
        section = engines.section(slices=[7, 3, 6], loss_reduction="mean_of_step", verify="first_batch")
        sgd = torch.optim.SGD(module.parameters(), lr=0.1)
        with engines.started(module, section, initialize={"optimizer": sgd, "model_parameters": None},
                             train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=2,
                             train_batch_size=8, gradient_clipping=0) as engine:  # fmt: skip
            own = batches[engine.grid.get_data_parallel_rank() :: 2]
            value = float(engine.train_batch(iter(own)))
            names = module.checkpoint_names()
            expected = whole.state_dict()
            errors = [relative(module.get_parameter(key).detach(), expected[name]) for key, name in names.items()]
    return [abs(value - float(loss)) / float(loss), max(errors)]


def refusal(
    given: Mapping[str, Any],
    folder: str,
    kind: type[Trainer] = PipelineTrainer,
    make: Callable[..., Any] = trainer_of,
    **of_trainer: Any,
) -> str:
    """Return why a Trainer over stages refuses a setting, the same on all ranks; "" if it does not."""
    AcceleratorState._reset_state(True)
    try:
        setting = setting_of(given)
        make(kind, setting, folder, deepspeed_of(setting), **of_trainer)
    except Exception as error:
        texts = gathered(str(error))
        return texts[0] if len(set(texts)) == 1 else f"differs: {texts}"
    return ""


def sharded_by_rank(folder: str) -> str:
    """Return the error of a run whose stages get the shares of data that their ranks would get without stages."""
    setting, world = setting_of({"args": {"max_steps": 1}}), torch_dist.get_world_size()
    with mock.patch.object(PipelineAccelerator, "num_processes", world):
        with mock.patch.object(PipelineAccelerator, "process_index", torch_dist.get_rank()):
            try:
                play(PipelineTrainer, setting, folder, deepspeed_of(setting), trainer_of)
            except Exception as error:
                return str(error)
    return ""


def seeds_of_devices(folder: str) -> list[tuple[int, int]]:
    """Return the seeds that the engine's start gives to a device, beside the seed of the arguments."""
    setting = setting_of({"ds": {"pipeline": {"stages": 1}, "sequence_parallel_size": 2}, "section": {"slices": 2}})
    seeds = list[tuple[int, int]]()
    device = SimpleNamespace(device_name=lambda: "cuda", manual_seed_all=lambda seed: seeds.append((seed, args.seed)))
    trainer = trainer_of(PipelineTrainer, setting, folder, deepspeed_of(setting))
    args = trainer.args
    with mock.patch.object(stages, "get_accelerator", lambda: device):
        trainer.save_model(folder)
    trainer._stages.engine.destroy()
    return seeds


def collate_wrong(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Collate rows, with a label at the padding of the first text of all, which only one replica gets."""
    batch = collate(rows)
    if any(row["input_ids"] == rows_of(1)[0]["input_ids"] for row in rows):
        batch["labels"][batch["attention_mask"] == 0] = 1
    return batch


def error_of_one_rank(folder: str, phase: str, fault: str) -> tuple[str, str]:
    """Return the class and text of the error of a run: in data of one replica, on the last stage, or in a file."""
    stages = 1 if fault == "labels" else 2
    setting = setting_of({"ds": {"pipeline": {"stages": stages}}, "phases": [phase], "metrics": "largest"})

    def wrong(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        raise LookupError(f"no such label, with logits of {list(logits.shape)}")

    def full_disk(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def make(*args: Any, **kwargs: Any) -> Trainer:
        trainer = trainer_of(*args, **kwargs)
        if fault == "labels":
            trainer.data_collator = collate_wrong
        elif fault == "disk":
            trainer.processing_class = mock.Mock(save_pretrained=full_disk)  # one rank saves the tokenizer
        else:
            trainer.preprocess_logits_for_metrics = wrong
        return trainer

    return engines.raised_by(lambda: play(PipelineTrainer, setting, folder, deepspeed_of(setting), make))


@dataclasses.dataclass
class EstimatingArguments(TrainingArguments):
    """Have an estimate of each rank's own data, as Axolotl's have."""

    efficiency: float = 0.0


OF_ONE_RANK = {"learning_rate": 0.5, "warmup_steps": 3, "save_steps": 7, "num_train_epochs": 4, "seed": 7}


def arguments_of_one_rank(folder: str) -> dict[str, tuple[str, str]]:
    """Return the class and text of the error for each argument, and each length of data, that rank 1 alone has."""
    is_here, raised = torch_dist.get_rank() == 1, {}

    def trainer_with(**args: Any) -> Any:
        AcceleratorState._reset_state(True)
        setting = setting_of({"args": args if is_here else {}})
        return trainer_of(PipelineTrainer, setting, f"{folder}/{torch_dist.get_rank()}", deepspeed_of(setting))

    for name, value in OF_ONE_RANK.items():
        raised[name] = engines.raised_by(lambda: trainer_with(**{name: value}))  # noqa: B023
    with mock.patch.dict(globals(), TrainingArguments=EstimatingArguments):
        own = {"disable_tqdm": False, "log_level": "error", "run_name": "own", "dataloader_num_workers": 1}
        trainer = trainer_with(efficiency=0.9, **own)
    rows = rows_of(ROWS + 6 * is_here)
    raised["rows"] = engines.raised_by(lambda: trainer.evaluate(rows))
    trainer.args.max_steps = 2 + is_here
    raised["max_steps"] = engines.raised_by(trainer.train)
    trainer.args.max_steps, trainer.train_dataset = 2, rows
    raised["train_dataset"] = engines.raised_by(trainer.train)
    # a checkpoint of one rank, or one whose copy on one rank is damaged
    trainer.train_dataset, path = rows_of(), f"{trainer.args.output_dir}/checkpoint-1"
    resume = path if is_here else None
    raised["resume_from_checkpoint"] = engines.raised_by(lambda: trainer.train(resume_from_checkpoint=resume))
    Path(path).mkdir(parents=True)
    Path(path, "trainer_state.json").write_text('{"epoch": ' if is_here else "{}")
    raised["trainer_state.json"] = engines.raised_by(lambda: trainer.train(resume_from_checkpoint=path))
    return raised


class Asks(TrainerCallback):
    """Ask for something at one event of one step, on rank 1 alone."""

    def __init__(self, event: str, flag: str, step: int) -> None:
        setattr(self, event, functools.partial(self._ask, flag, step))

    def _ask(self, flag: str, step: int, args: Any, state: Any, control: Any, **_: Any) -> None:
        if torch_dist.get_rank() == 1 and state.global_step == step:
            setattr(control, flag, True)


def steps_of_uneven_epochs(folder: str, stops_after: int) -> tuple[int, str]:
    """Return the steps of a run in which one replica has fewer batches per epoch, and what its evaluation raises."""
    uneven = {"max_steps": 5, "gradient_accumulation_steps": 1, "accelerator_config": {"even_batches": False}}
    setting = setting_of({"args": uneven, "rows": 10, "ds": {"pipeline": {"stages": 1}}})
    AcceleratorState._reset_state(True)
    trainer = trainer_of(PipelineTrainer, setting, folder, deepspeed_of(setting))
    trainer.add_callback(Asks("on_epoch_end", "should_training_stop", stops_after))
    trainer.train()
    return trainer.state.global_step, engines.raised_by(lambda: trainer.evaluate(rows_of(10)))[1]


def asked_by_one_rank(folder: str) -> tuple[int, list[str], int]:
    """Return the steps, the checkpoints and the number of evaluations of a run whose callbacks ask on rank 1 alone."""
    setting = setting_of({"args": {"max_steps": 6, "eval_strategy": "steps", "eval_steps": 4}})
    asks = ("on_step_end", "should_save", 1), ("on_step_end", "should_evaluate", 2)
    AcceleratorState._reset_state(True)
    trainer: Any = trainer_of(PipelineTrainer, setting, folder, deepspeed_of(setting))
    for ask in (*asks, ("on_evaluate", "should_training_stop", 4)):
        trainer.add_callback(Asks(*ask))
    trainer.train()
    evaluations = sum("eval_loss" in log for log in trainer.state.log_history)
    return trainer.state.global_step, sorted(path.name for path in Path(folder).iterdir()), evaluations


def stopped_by_one_rank(
    folder: str, stages: int, event: str, step: int, flag: str = "should_training_stop"
) -> tuple[int, float]:
    """Return the steps and the epochs of a run that rank 1 alone asks to stop at an event after some steps."""
    args = {"max_steps": 8, "eval_on_start": event == "on_evaluate"}
    setting = setting_of({"args": args, "ds": {"pipeline": {"stages": stages}}})
    AcceleratorState._reset_state(True)
    trainer: Any = trainer_of(PipelineTrainer, setting, folder, deepspeed_of(setting))
    trainer.add_callback(Asks(event, flag, step))
    trainer.train()
    return trainer.state.global_step, trainer.state.epoch


def mistakes_after_a_start(folder: str) -> list[tuple[str, str]]:
    """Return the class and text of each error, in a Trainer whose engine has started."""
    setting = setting_of({})
    AcceleratorState._reset_state(True)
    trainer: Any = trainer_of(PipelineTrainer, setting, folder, deepspeed_of(setting))
    trainer.evaluate()
    trainer.args.learning_rate, trainer.args.max_grad_norm = 0.5, 7.0
    calls: list[Callable[[], Any]] = [
        trainer.train,
        lambda: trainer.model.save_pretrained(folder),
        trainer.model.state_dict,
        lambda: trainer.accelerator.get_state_dict(trainer.model),
    ]
    # torch only warns of values for a model without memory, and stages do not see what a callback freezes
    calls.append(lambda: trainer.model.load_state_dict(model_of(setting).state_dict()))
    raised = [engines.raised_by(call) for call in calls]
    vars(trainer.args).update(trainer._started_with)
    with mock.patch.object(trainer, "compute_loss_func", print):
        raised += [engines.raised_by(call) for call in (trainer.train, trainer.evaluate)]
    weight = trainer.model.get_input_embeddings().weight
    for change in (
        lambda _: vars(trainer.args).update(max_grad_norm=7.0),
        lambda weight: weight.register_hook(torch.zeros_like),
        lambda weight: weight.register_post_accumulate_grad_hook(torch.zero_),
        lambda weight: weight.requires_grad_(False),
    ):
        trainer.add_callback(Changes(change))
        raised.append(engines.raised_by(trainer.train))
        trainer.pop_callback(Changes)
        vars(trainer.args).update(trainer._started_with)
        for hooks in (weight._backward_hooks, weight._post_accumulate_grad_hooks):
            if hooks:
                hooks.clear()
    weight.requires_grad_(torch_dist.get_rank() == 0)
    return [*raised, engines.raised_by(trainer.train)]


class Changes(TrainerCallback):
    """Change an argument, or what happens to the embedding, from the second step on, on rank 0, as wandb does."""

    def __init__(self, change: Callable[[torch.Tensor], object]) -> None:
        self._change = change

    def on_step_end(self, *_: Any, model: Any = None, **__: Any) -> None:
        if torch_dist.get_rank() == 0:
            self._change(model.get_input_embeddings().weight)


def pushed(folder: str) -> list[set[str]]:
    """Return the files of each folder that a run pushes, to a hub that only writes them down."""
    uploads: list[set[str]] = []

    def upload(folder_path: str, **_: Any) -> mock.Mock:
        uploads.append({path.name for path in Path(folder_path).iterdir()})
        return mock.Mock(is_done=lambda: True)

    hub = mock.Mock(upload_folder=upload, create_repo=lambda name, **_: mock.Mock(repo_id=name))
    setting = setting_of({"args": {"push_to_hub": True, "hub_model_id": "me/model", "max_steps": 2}})
    is_older = not hasattr(transformers.trainer, "hf_api")
    names = {name: getattr(hub, name) for name in ("create_repo", "upload_folder")}
    stand_ins = names if is_older else {"hf_api": mock.Mock(return_value=hub)}
    with mock.patch.multiple("transformers.trainer", **stand_ins):
        AcceleratorState._reset_state(True)
        trainer = trainer_of(PipelineTrainer, setting, folder, deepspeed_of(setting))
        trainer.train()
        trainer.save_model()
        trainer.push_to_hub()
    return uploads
