"""Train over pipeline stages under Ray Train: its workers are the ranks, and each calls the same function.

    python examples/clusters/ray_train.py --workers 2 --config configs/sliced_8.json

Needs `pip install 'ray[train]'`, and GPUs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def train(settings: dict[str, Any]) -> None:
    """Train some steps; Ray has set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for this worker."""
    import deepspeed
    import ray.train
    import torch
    from deepspeed.pipe import PipelineModule

    import terapipe_ds
    from terapipe_ds.models.gpt import GPTConfig, gpt_layers, gpt_loss

    deepspeed.init_distributed()
    layers = gpt_layers(GPTConfig.from_name("tiny"))
    module = PipelineModule(layers, num_stages=settings["stages"], loss_fn=gpt_loss)
    config = settings["ds_config"]
    engine, *_ = terapipe_ds.initialize(model=module, model_parameters=module.parameters(), config=config)
    torch.manual_seed(engine.grid.get_data_parallel_rank())
    rows = engine.train_micro_batch_size_per_gpu()
    for step in range(settings["steps"]):
        batches = [torch.randint(0, 256, (rows, 513)) for _ in range(engine.gradient_accumulation_steps())]
        data = iter([(tokens[:, :-1], tokens[:, 1:]) for tokens in batches])
        loss = engine.train_batch(data_iter=data)
        ray.train.report({"step": step, "loss": float(loss)})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2, help="ranks, a GPU each (default: 2)")
    parser.add_argument("--stages", type=int, default=2, help="pipeline stages (default: 2)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--config", type=Path, default=Path("configs/sliced_8.json"), help="the DeepSpeed JSON")
    options = parser.parse_args()
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer

    settings = {"stages": options.stages, "steps": options.steps, "ds_config": json.loads(options.config.read_text())}
    scaling = ScalingConfig(num_workers=options.workers, use_gpu=True)
    print(TorchTrainer(train, train_loop_config=settings, scaling_config=scaling).fit().metrics)


if __name__ == "__main__":
    main()
