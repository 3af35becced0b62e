"""Train with TRL's SFTTrainer in one process, and over stages. Runs inside the ranks."""

from collections.abc import Mapping
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as torch_dist
from accelerate.state import AcceleratorState
from bitsandbytes.nn import Linear4bit
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import BitsAndBytesConfig, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from terapipe_ds.integrations.trainer import PipelineSFTTrainer
from terapipe_ds.losses import deferred
from tests.distributed import trainer_jobs
from tests.distributed.trainer_jobs import Recorder, model_of

WORDS = [*"abcdefghijklmnopqrstuvwxyz"]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {% if m.role == 'assistant' %}{% generation %}{{ m.content }} </s> "
    "{% endgeneration %}{% else %}{{ m.content }} {% endif %}{% endfor %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    special = ["<pad>", "</s>", "<user>", "<assistant>"]
    words = {word: index for index, word in enumerate([*special, *WORDS])}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    options = {"pad_token": "<pad>", "eos_token": "</s>", "additional_special_tokens": special[2:]}
    return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=TEMPLATE, **options)


def chats(number: int = 22, kind: str = "messages") -> Dataset:
    """Return chats of different lengths, or pairs of prompt and completion."""
    generator, rows = torch.Generator().manual_seed(1), []
    for _ in range(number):
        sizes = torch.randint(2, 6, (2,), generator=generator).tolist()
        drawn = [torch.randint(0, len(WORDS), (size,), generator=generator).tolist() for size in sizes]
        question, answer = (" ".join(WORDS[index] for index in one) for one in drawn)
        rows.append([{"role": "user", "content": question}, {"role": "assistant", "content": answer}])
    if kind == "messages":
        return Dataset.from_dict({"messages": rows})
    return Dataset.from_dict({"prompt": [row[:1] for row in rows], "completion": [row[1:] for row in rows]})


def trainer_of(kind: type[SFTTrainer], setting: Mapping[str, Any], folder: str, deepspeed: Any, seed: int = 3) -> Any:
    options = {
        "per_device_train_batch_size": 2, "per_device_eval_batch_size": 4, "gradient_accumulation_steps": 3,
        "max_steps": 5, "logging_steps": 1, "save_strategy": "no", "report_to": [], "use_cpu": True,
        "disable_tqdm": True, "learning_rate": 1e-3, "max_grad_norm": 0.0, "weight_decay": 0.1, "adam_epsilon": 1e-4,
        "gradient_checkpointing": False, "max_length": 16, "bf16": False, **setting["args"],
    }  # fmt: skip
    args = SFTConfig(folder, deepspeed=deepspeed, **options)
    lora = setting.get("lora")
    given: dict[str, Any] = {"peft_config": LoraConfig(**lora)} if lora else {}
    data = {"train_dataset": chats(setting.get("chats", 22), setting.get("data", "messages")), "eval_dataset": chats(8)}
    if setting.get("data"):
        data["eval_dataset"] = chats(8, setting["data"])
    model: Any = model_of(setting, seed)
    if setting.get("is_by_name"):
        model.save_pretrained(f"{folder}/model")
        tokenizer().save_pretrained(f"{folder}/model")
        model = f"{folder}/model"
    else:
        given["processing_class"] = tokenizer()
    return kind(model=model, args=args, callbacks=[Recorder()], **data, **given)


def compare(given: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Return how the pipeline's run differs from SFTTrainer's in one process."""
    with_slices = {"section": {"slices": 3, "granularity_tokens": 1}, **given}
    return trainer_jobs.compare(with_slices, folder, (SFTTrainer, PipelineSFTTrainer), trainer_of)


def tokens_of_an_epoch(folder: str) -> list[int]:
    """Return the tokens that two replicas count for five chats, one at a time, and the tokens of the chats."""
    AcceleratorState._reset_state(True)
    args = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "max_steps": -1, "num_train_epochs": 1}
    setting = trainer_jobs.setting_of({"args": args, "chats": 5, "ds": {"pipeline": {"stages": 1}}})
    config = trainer_jobs.deepspeed_of({**setting, "section": {"slices": 1}})
    trainer = trainer_of(PipelineSFTTrainer, setting, folder, config)
    trainer.train()
    trainer._stages.engine.destroy()
    return [int(trainer.state.log_history[-2]["num_tokens"]), sum(map(len, trainer.train_dataset["input_ids"]))]


class MostTokens(TorchDispatchMode):
    """Write down for how many tokens a tensor has one number per entry of a vocabulary, at most."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary, self.tokens = vocabulary, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if torch.is_tensor(each) and each.dim() and each.shape[-1] == self.vocabulary:
                self.tokens = max(self.tokens, each.numel() // self.vocabulary)
        return made


def most_tokens_with_logits(given: Mapping[str, Any], folder: str, vocabulary: int, chunk: int) -> tuple[int, int]:
    """Train and evaluate with a loss in chunks of `chunk` tokens. Return `MostTokens` of both, after the first step."""
    AcceleratorState._reset_state(True)
    args = {"max_steps": 1, "per_device_train_batch_size": 8, "per_device_eval_batch_size": 8, **given}
    setting = trainer_jobs.setting_of({"model": {"vocab_size": vocabulary}, "args": args})
    section = {"slices": 3, "granularity_tokens": 1}
    config = trainer_jobs.deepspeed_of({**setting, "section": section})
    trainer = trainer_of(PipelineSFTTrainer, setting, folder, config)
    trainer.train()  # the engine tries the loss of the first batch on logits
    with mock.patch.object(deferred, "loss_chunk_tokens", lambda vocabulary, on_cpu: chunk):
        with MostTokens(vocabulary) as training:
            trainer.train()
        with MostTokens(vocabulary) as evaluation:
            trainer.evaluate()
    return training.tokens, evaluation.tokens


def losses_beside_4_bits(folder: str) -> tuple[list[float], list[float], int]:
    """Train adapters beside NF4 weights, in one process and over stages; count 4-bit layers of this stage."""
    lora = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    setting = trainer_jobs.setting_of({"is_by_name": True, "lora": lora, "args": {"max_steps": 3}})
    quantization = {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")}

    def losses_of(kind: type[SFTTrainer], config: Any) -> tuple[list[float], SFTTrainer]:
        AcceleratorState._reset_state(True)
        trainer = trainer_of(partial(kind, **quantization), setting, f"{folder}/{kind.__name__}", config)
        trainer.train()
        return [each["loss"] for each in trainer.state.log_history if "loss" in each], trainer

    whole: list[float] = []
    if torch_dist.get_rank() == 0:
        with trainer_jobs.alone():
            whole, one = losses_of(SFTTrainer, None)
        assert one.model.is_loaded_in_4bit
    torch_dist.barrier()
    section = {"slices": 3, "granularity_tokens": 1}
    staged, trainer = losses_of(PipelineSFTTrainer, trainer_jobs.deepspeed_of({**setting, "section": section}))
    count = sum(isinstance(module, Linear4bit) for module in trainer._stages.engine.module.modules())
    trainer._stages.engine.destroy()
    return whole, staged, count
