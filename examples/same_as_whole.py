"""Train a small model in token slices and in a plain loop, and show that losses and weights come out the same.

    deepspeed --num_gpus 2 examples/same_as_whole.py

On a machine without accelerators put ``DS_ACCELERATOR=cpu OMP_NUM_THREADS=1`` in front.
"""

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, PipelineModule
from ranks import prepare_rank
from torch import nn

import terapipe_ds

VOCABULARY, WIDTH, HEADS, LENGTH, MICRO_BATCHES, STEPS = 64, 32, 4, 48, 2, 5
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": MICRO_BATCHES,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "steps_per_print": 1000,
    "terapipe": {"enabled": True, "slices": [20, 16, 12], "granularity_tokens": 4},
}


class Block(nn.Module):
    """A decoder layer in plain torch: the engine puts its own attention in the place of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


def layers() -> list[LayerSpec]:
    blocks = [LayerSpec(Block) for _ in range(4)]
    return [LayerSpec(nn.Embedding, VOCABULARY, WIDTH), *blocks, LayerSpec(nn.Linear, WIDTH, VOCABULARY)]


def loss_fn(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def main() -> None:
    prepare_rank()
    deepspeed.init_distributed()
    module = PipelineModule(layers(), num_stages=deepspeed.comm.get_world_size(), loss_fn=loss_fn)
    torch.manual_seed(0)  # from here on all ranks draw alike
    plain = nn.Sequential(*(spec.build() for spec in layers())).to(get_accelerator().current_device_name())
    start = plain.state_dict()
    module.load_state_dict({name: start[name] for name in module.state_dict()})  # this stage's share of the weights
    engine, *_ = terapipe_ds.initialize(model=module, model_parameters=module.parameters(), config=CONFIG)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)

    for step in range(STEPS):
        text = torch.randint(VOCABULARY, (MICRO_BATCHES, 2, LENGTH + 1), device=engine.device)
        batch = [(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in text]
        sliced = float(engine.train_batch(iter(batch)))  # 3 slices per sequence, over all stages
        whole = sum(loss_fn(plain(tokens), labels) / MICRO_BATCHES for tokens, labels in batch)
        whole.backward()
        optimizer.step()
        optimizer.zero_grad()
        if deepspeed.comm.get_rank() == 0:
            print(f"step {step + 1}  loss in slices {sliced:.6f}  whole {whole.item():.6f}")
        assert abs(sliced - whole.item()) < 1e-5
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter, plain.get_parameter(name), rtol=1e-4, atol=1e-6)


if __name__ == "__main__":
    main()
