"""Read models of transformers from folders, train them, and write them back. Runs inside the ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist
from safetensors import safe_open
from transformers import AutoModelForCausalLM

import terapipe_ds
from tests.distributed import engines
from tests.distributed.compare import relative_error
from tests.distributed.hugging_face_jobs import batches, engine_of, weights_of_all_stages
from tests.hugging_face_families import config_of
from tests.unit.models.hugging_face.sliced_model import loss_of


def keys_in(folder: str) -> list[str]:
    """All keys of the safetensors of a folder, sorted; one that two files have comes twice."""
    keys: list[str] = []
    for path in Path(folder).glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            keys += file.keys()
    return sorted(keys)


def write_model(family: str, folder: str, **options: Any) -> None:
    """Let transformers write a random model and rank 0 a file of a tokenizer."""
    torch.manual_seed(3)
    if torch_dist.get_rank() == 0:
        AutoModelForCausalLM.from_config(config_of(family)).save_pretrained(folder, **options)
        Path(folder, "tokenizer.json").write_text("{}")
    torch_dist.barrier()


def round_trip(family: str, folder: str, stages: int = 2, **options: Any) -> dict[str, Any]:
    """Read, write, train, write again; what was found on this rank."""
    first, same, trained = (f"{folder}/{name}" for name in ("first", "same", "trained"))
    write_model(family, first, max_shard_size="50KB")
    module = terapipe_ds.from_pretrained(first, num_stages=stages, **options)
    module.config._experts_implementation = "eager"
    theirs = AutoModelForCausalLM.from_pretrained(first).state_dict()
    read = weights_of_all_stages(module)
    found: dict[str, Any] = {"read": all(torch.equal(value, theirs[name]) for name, value in read.items())}
    section = engines.section(slices=[7, 3, 6])
    with engine_of(module, section) as engine:
        terapipe_ds.save_pretrained(engine, same)
        torch_dist.barrier()
        found["keys"] = keys_in(same) == keys_in(first)
        again = AutoModelForCausalLM.from_pretrained(same).state_dict()
        found["written"] = again.keys() == theirs.keys() and all(torch.equal(again[key], theirs[key]) for key in theirs)
        data = batches(module.config.get_text_config().vocab_size)
        engines.train(engine, [[module.to_tuple(batch) for batch in step] for step in data])
        evaluated = engine.eval_batch(iter([module.to_tuple(batch) for batch in data[0]]))
        Path(trained).mkdir(exist_ok=True)
        Path(trained, "adapter_config.json").write_text("{}")  # of an earlier run
        terapipe_ds.save_pretrained(engine, trained)
    found["files"] = sorted(path.name for path in Path(trained).iterdir())
    model = AutoModelForCausalLM.from_pretrained(trained, attn_implementation="eager").eval()
    found["moved"] = any(not torch.equal(value, theirs[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        expected = sum(float(loss_of(model, batch)) for batch in data[0]) / len(data[0])
    found["evaluation"] = relative_error(float(evaluated), expected)
    return found


def private_bytes() -> int:
    """The memory of this process that belongs to no file."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    fields = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines[1:]}
    return fields["Anonymous"]


def memory_of_reading(folder: str, **fields: Any) -> tuple[int, int]:
    """How much private memory grows at most while a model is read over two stages, and the bytes of the model."""
    import threading

    config = config_of("llama")
    for name, value in fields.items():
        setattr(config, name, value)
    if torch_dist.get_rank() == 0:
        AutoModelForCausalLM.from_config(config).save_pretrained(folder, max_shard_size="200MB")
    torch_dist.barrier()
    size = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
    peak, stop, before = [0], threading.Event(), private_bytes()

    def watch() -> None:
        while not stop.wait(0.02):
            peak[0] = max(peak[0], private_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    module = terapipe_ds.from_pretrained(folder, num_stages=2)
    stop.set()
    watcher.join()
    assert sum(p.numel() for p in module.parameters()) * 4 > size / 3
    return max(peak[0], private_bytes()) - before, size
