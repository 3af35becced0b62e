"""Fine-tune a tiny model on chats with TRL over pipeline stages; go on from the last checkpoint in --out.

deepspeed --num_gpus 2 examples/sft_trl.py  # on CPUs put DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 in front
"""

import argparse
from itertools import pairwise
from pathlib import Path

import torch
from command_line import Parser
from datasets import Dataset
from hf_data import tiny_llama, train_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig

from terapipe_ds.integrations.trainer import PipelineSFTTrainer  # in place of trl.SFTTrainer

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
PAIRS = [(f"What follows {one}?", f"After {one} comes {two}.") for one, two in pairwise(WORDS)]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }} Answer: {% else %}"
    "{% generation %}{{ m.content + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
)
CHATS = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in PAIRS]

parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--out", default="out/sft_trl", help="the folder of checkpoints and of the trained model")
parser.add_argument("--steps", type=int, default=100, help="optimizer steps in all, before and after a resume")
parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)  # the launcher gives it


def main() -> None:
    """Train, save and answer."""
    given, ds_config = parser.parse_args(), str(Path(__file__).parents[1] / "configs/trainer.json")
    args = SFTConfig(
        given.out, max_steps=given.steps, per_device_train_batch_size=3, gradient_accumulation_steps=3, save_steps=50,
        learning_rate=2e-3, lr_scheduler_type="constant", bf16=False, assistant_only_loss=True, report_to="none",
        use_cpu=not torch.cuda.is_available(), deepspeed=ds_config,  # it names the stages
    )  # fmt: skip
    model = Path(given.out, "initial")
    with args.main_process_first():
        if not model.exists():
            tokenizer = train_tokenizer([text for pair in PAIRS for text in pair], vocab_size=400)
            tokenizer.chat_template, tokenizer.pad_token = TEMPLATE, tokenizer.eos_token
            tokenizer.save_pretrained(model)
            AutoModelForCausalLM.from_config(tiny_llama(tokenizer)).save_pretrained(model)
    trainer = PipelineSFTTrainer(model=str(model), args=args, train_dataset=Dataset.from_dict({"messages": CHATS * 3}))
    trainer.train(resume_from_checkpoint=get_last_checkpoint(given.out) is not None)
    trainer.save_model()
    if trainer.is_world_process_zero():
        tokenizer, trained = (kind.from_pretrained(given.out) for kind in (AutoTokenizer, AutoModelForCausalLM))
        ids = tokenizer.apply_chat_template(CHATS[3][:1], return_tensors="pt")["input_ids"]
        answer = trained.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.size(1) :]
        print(f"{PAIRS[3][0]} {tokenizer.decode(answer, skip_special_tokens=True)}")


if __name__ == "__main__":
    main()
