"""The smallest complete program: a GPT over pipeline stages, trained in token slices.

    deepspeed --num_gpus 2 examples/quickstart.py

On a machine without accelerators put ``DS_ACCELERATOR=cpu OMP_NUM_THREADS=1`` in front.
"""

import inspect
import os

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule

import terapipe_ds
from terapipe_ds.models.gpt import GPTConfig, gpt_layers, gpt_loss

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "steps_per_print": 1000,
    "terapipe": {"enabled": True, "slices": 4},
}


def batches(length: int):
    """Random windows of the source text of torch.nn.functional, a byte is a token; labels one byte ahead."""
    text = torch.tensor(list(inspect.getsource(torch.nn.functional).encode()))
    generator = torch.Generator().manual_seed(0)  # the same on every rank
    while True:
        start = int(torch.randint(len(text) - length, (), generator=generator))
        window = text[None, start : start + length + 1]
        yield window[:, :-1], window[:, 1:]


def main() -> None:
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit("one process per stage is missing: deepspeed --num_gpus 2 examples/quickstart.py")
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    terapipe_ds.register()  # first, or DeepSpeed compiles an operator on CPUs, for minutes
    deepspeed.init_distributed()

    layers = gpt_layers(GPTConfig.from_name("tiny"))
    model = PipelineModule(layers, num_stages=deepspeed.comm.get_world_size(), loss_fn=gpt_loss)
    engine, *_ = terapipe_ds.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    data = batches(length=512)
    for step in range(1, 21):
        loss = engine.train_batch(data_iter=data)
        if deepspeed.comm.get_rank() == 0:
            print(f"step {step:2d}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
