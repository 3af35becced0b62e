"""Read models of transformers from folders, train them, and write them back. Runs inside the ranks."""

import contextlib
import copy
import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as torch_dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, CompileConfig, GenerationConfig

import terapipe_ds
from terapipe_ds.models.hugging_face.layers import Piece
from terapipe_ds.models.hugging_face.refusals import gathered
from terapipe_ds.models.hugging_face.weights.stored import INDEX, SINGLE, StoredWeights
from terapipe_ds.models.hugging_face.weights.unread import read
from tests.distributed import engines
from tests.distributed.cases import relative_error
from tests.distributed.hugging_face_jobs import batches, engine_of, weights_of_all_stages
from tests.hugging_face_families import config_of
from tests.unit.models.hugging_face.sliced_model import loss_of

TOKENIZER = ("tokenizer.json", "emoji.json", "tekken.json", "additional_chat_templates/tools.jinja")


def keys_in(folder: str) -> list[str]:
    """Return all keys of the safetensors of a folder, sorted; a key in two files comes twice."""
    keys: list[str] = []
    for path in Path(folder).glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            keys += file.keys()
    return sorted(keys)


def write_model(family: str, folder: str, num_layers: int | None = None, **options: Any) -> None:
    """Let transformers write a random model and rank 0 files of a tokenizer."""
    torch.manual_seed(3)
    config = config_of(family, num_layers)
    if torch_dist.get_rank() == 0:
        model = AutoModelForCausalLM.from_config(config)
        model.generation_config.max_new_tokens = 17
        model.save_pretrained(folder, **options)
        for name in TOKENIZER:
            Path(folder, name).parent.mkdir(exist_ok=True)
            Path(folder, name).write_text("{}")
        Path(folder, TOKENIZER[-1]).parent.chmod(0o555)  # as in a folder that a user may only read
    torch_dist.barrier()


def round_trip(
    family: str,
    folder: str,
    stages: int = 2,
    num_layers: int | None = None,
    terapipe: dict[str, Any] | None = None,
    changes: dict[str, Any] | None = None,
    by_skeleton: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Read, write, train, write again; return the findings on this rank."""
    first, same, trained = (f"{folder}/{name}" for name in ("first", "same", "trained"))
    write_model(family, first, num_layers, max_shard_size="50KB")
    source = terapipe_ds.skeleton(first) if by_skeleton else first
    module = terapipe_ds.from_pretrained(source, num_stages=stages, **options)
    module.config._experts_implementation = "eager"
    theirs = AutoModelForCausalLM.from_pretrained(first).state_dict()
    read = weights_of_all_stages(module)
    found: dict[str, Any] = {"read": all(torch.equal(value, theirs[name]) for name, value in read.items())}
    section = engines.section(slices=[7, 3, 6], verify="off", **(terapipe or {}))
    with engine_of(module, section, **(changes or {})) as engine:
        terapipe_ds.save_pretrained(engine, same)
        torch_dist.barrier()
        found["keys"] = keys_in(same) == keys_in(first)
        found["copied"] = engines.raised_by(lambda: copy.deepcopy(module))
        again = AutoModelForCausalLM.from_pretrained(same, dtype="auto").state_dict()
        cast = {key: value.to(again[key].dtype) for key, value in theirs.items()}
        found["written"] = again.keys() == theirs.keys() and all(torch.equal(again[key], cast[key]) for key in cast)
        data = batches(module.config.get_text_config().vocab_size)
        engines.train(engine, [[module.to_tuple(batch) for batch in data[1]]])
        evaluated = engine.eval_batch(iter([module.to_tuple(batch) for batch in data[0]]))
        given = iter([module.to_tuple(batch) for batch in data[0]])
        logits = engine.eval_batch(given, compute_loss=False, reduce_output=None)
        Path(trained).mkdir(exist_ok=True)
        for name in ("adapter_config.json", "added_tokens.json"):  # of an earlier run, with another tokenizer
            Path(trained, name).write_text("{}")
        terapipe_ds.save_pretrained(engine, trained)
        own = {name: module.get_parameter(local).detach() for local, name in module.checkpoint_names().items()}
    found["generation"] = GenerationConfig.from_pretrained(trained).max_new_tokens
    written = [path for path in Path(trained).rglob("*") if path.is_file() and path.parent.stat().st_mode & 0o200]
    found["files"] = sorted(str(path.relative_to(trained)) for path in written)
    model = AutoModelForCausalLM.from_pretrained(trained, attn_implementation="eager", dtype="auto").eval()
    state = model.state_dict()
    found["saved"] = all(torch.equal(value, state[name]) for name, value in own.items())
    found["moved"] = any(not torch.equal(value, cast[name]) for name, value in state.items())
    with torch.no_grad():
        expected = sum(float(loss_of(model, batch)) for batch in data[0]) / len(data[0])
        theirs_now = [model(batch["input_ids"]).logits for batch in data[0]]
    found["evaluation"] = relative_error(float(evaluated), expected)
    found["logits"] = 0.0
    if logits is not None:  # on the last stage
        pairs = zip(logits, theirs_now, strict=True)
        found["logits"] = max(float((ours - theirs).norm() / theirs.norm()) for ours, theirs in pairs)
    return found


def reading(folder: str, terapipe: dict[str, Any] | None) -> dict[str, Any]:
    """Return which modules are read before and by an engine, into layers that this stage has then; and their values."""
    write_model("llama", folder, num_layers=4)
    theirs = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    reads, original = list[tuple[str, list[Any]]](), StoredWeights._read

    def noted(self: StoredWeights, name: str, tensors: Any) -> None:
        reads.append((name, list(tensors.values())))  # kept, so that no other gets their ids
        original(self, name, tensors)

    with mock.patch.object(StoredWeights, "_read", noted):
        module = terapipe_ds.from_pretrained(folder, num_stages=2)
        listed = [parameter for parameter in module.parameters() if parameter.requires_grad]
        early = {id(each) for each in listed}

        def read_into(wanted: set[int]) -> list[str]:
            return sorted(name for name, tensors in reads if wanted & {id(each) for each in tensors})

        found: dict[str, Any] = {"early": read_into(early)}
        with engine_of(module, terapipe) as engine:
            held = {id(each) for each in engine.module.parameters()}
            names = module.checkpoint_names()
            found["read"] = read_into(held | early)
            found["held"] = sorted(
                {name for each in module.modules() if isinstance(each, Piece) for name in each.names}
            )
            found["equal"] = all(torch.equal(module.get_parameter(key), theirs[name]) for key, name in names.items())
    return found


def tensors_of(module: Any) -> dict[str, Tensor]:
    """Return the parameters and buffers of this stage by their names in the model of transformers."""
    runs = [piece.runs for piece in module.modules() if isinstance(piece, Piece)]
    modules = {name: held for of_piece in runs for name, held in of_piece.items()}
    kinds = nn.Module.named_parameters, nn.Module.named_buffers
    return {key: each for name, held in modules.items() for kind in kinds for key, each in kind(held, name)}


def change_and_move(folder: str, family: str, changed: str) -> bool:
    """Return whether a tensor that is changed before `initialize` moves with its layer to another stage."""
    write_model(family, folder, num_layers=4)
    module = terapipe_ds.from_pretrained(folder, num_stages=2)
    if (tensor := tensors_of(module).get(changed)) is not None:
        tensor.data.fill_(0.125)
    with engine_of(module, engines.section(schedule="zbv")):
        own = tensors_of(module)
        stages = [names for names in gathered([*own]) if changed in names]
        return len(stages) == 1 and (changed not in own or bool((own[changed] == 0.125).all()))


def generation_settings(folder: str, **of_model: Any) -> tuple[Any, Any]:
    """Return the settings in a save of a model whose config has some of them, and in a save of what was read of it.

    transformers would not save the model.
    """
    first, second = f"{folder}/first", f"{folder}/second"
    model = AutoModelForCausalLM.from_config(config_of("llama"))
    for name, value in of_model.items():
        setattr(model.config, name, value)
    model.generation_config.temperature = 0.25  # without do_sample
    model.generation_config.compile_config = CompileConfig()  # transformers could not read it again
    with engine_of(terapipe_ds.from_pretrained(model, num_stages=2), engines.section()) as engine:
        terapipe_ds.save_pretrained(engine, first)
    torch_dist.barrier()
    saved = GenerationConfig.from_pretrained(first).temperature
    torch_dist.barrier()
    if torch_dist.get_rank() == 0:
        Path(first, "generation_config.json").unlink()
        path = Path(first, "config.json")
        path.write_text(json.dumps(json.loads(path.read_text()) | of_model))
    torch_dist.barrier()
    with engine_of(terapipe_ds.from_pretrained(first, num_stages=2), engines.section()) as engine:
        terapipe_ds.save_pretrained(engine, second)
    torch_dist.barrier()
    read = GenerationConfig.from_pretrained(second)
    AutoModelForCausalLM.from_pretrained(second)
    return saved, {name: getattr(read, name) for name in of_model}


def saved_without_source(folder: str) -> tuple[bool, list[str]]:
    """Return whether all weights are saved when the program left the folder that it named, and the folder is gone."""
    write_model("llama", f"{folder}/first")
    theirs = AutoModelForCausalLM.from_pretrained(f"{folder}/first").state_dict()
    with contextlib.chdir(folder):
        module = terapipe_ds.from_pretrained("first", num_stages=2)
    with engine_of(module, engines.section()) as engine, engines.logged() as lines:
        torch_dist.barrier()
        if torch_dist.get_rank() == 0:
            Path(folder, "first").rename(f"{folder}/gone")
        torch_dist.barrier()
        terapipe_ds.save_pretrained(engine, f"{folder}/second")
    torch_dist.barrier()
    saved = AutoModelForCausalLM.from_pretrained(f"{folder}/second").state_dict()
    return all(torch.equal(saved[name], value) for name, value in theirs.items()), lines


def changed_skeletons(folder: str) -> tuple[bool, tuple[str, str]]:
    """Return whether buffers of a skeleton are kept, and the error if it has a weight of its own."""
    write_model("deepseek_v3", folder)
    model = terapipe_ds.skeleton(folder)
    biases = {name: each for name, each in model.named_buffers() if name.endswith("e_score_correction_bias")}
    for bias in biases.values():
        bias.fill_(0.125)
    module = terapipe_ds.from_pretrained(model, num_stages=2)
    read(module.parameters())
    kept = [bool((each == 0.125).all()) for name, each in tensors_of(module).items() if name in biases]
    model.lm_head.weight = nn.Parameter(torch.zeros(model.lm_head.weight.shape))
    raised = engines.raised_by(lambda: terapipe_ds.from_pretrained(model, num_stages=2))
    return bool(biases) and all(kept) and sum(gathered(len(kept))) == len(biases), raised


def reads_as_transformers(folder: str, how: str) -> bool:
    """Return whether both read the same weights of a folder with more than one set of files, or other names."""
    if how == "beside an index":  # the shards go with the next save by transformers, the index stays
        write_model("llama", folder, max_shard_size="50KB")
    write_model("llama", folder)
    if torch_dist.get_rank() == 0:
        config, weights, fields = Path(folder, "config.json"), Path(folder, SINGLE), dict[str, Any]()
        changed = {key: value + 1 for key, value in load_file(weights).items()}
        if "named by config" in how:
            name = "weights/other.safetensors" if "subfolder" in how else "other.safetensors"
            weights, fields = Path(folder, name), {"transformers_weights": name}
            weights.parent.mkdir(exist_ok=True)
        elif "tied" in how:
            fields = {"tie_word_embeddings": True}
            changed["model.embed_tokens.weight"] = changed["lm_head.weight"].clone()
            changed = {key: value for key, value in changed.items() if "embed" not in key or how == "tied, twice"}
        config.write_text(json.dumps(json.loads(config.read_text()) | fields))
        save_file(changed, weights, metadata={"format": "pt"})
    torch_dist.barrier()
    theirs = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    read = weights_of_all_stages(terapipe_ds.from_pretrained(folder, num_stages=2))
    return all(torch.equal(value, theirs[name]) for name, value in read.items())


def spoilt(folder: str, how: str) -> None:
    """Spoil a folder of two files."""
    path = Path(folder)
    _, second = sorted(path.glob("model-*.safetensors"))[:2]
    state = load_file(second)
    key = sorted(state)[0]
    if how == "missing file":
        second.unlink()
    elif how == "half a file":
        second.write_bytes(second.read_bytes()[:-100])
    elif how == "missing key":
        save_file({name: value for name, value in state.items() if name != key}, second)
    elif how == "key in no file":
        index = json.loads((path / INDEX).read_text())
        del index["weight_map"][key]
        (path / INDEX).write_text(json.dumps(index))
    elif how == "other shape":
        save_file({**state, key: state[key].new_zeros(3)}, second)
    elif how == "other dtype":
        save_file({**state, key: state[key].to(torch.int8)}, second)
    elif how == "no object":
        (path / INDEX).write_text("[]")
    elif how == "other form":
        for file in path.glob("model*"):
            file.unlink()
        (path / "pytorch_model.bin").write_bytes(b"")
    else:
        raise ValueError(how)


def refused_reading(folder: str, how: str, on_one_rank: bool, later: bool) -> tuple[str, str]:
    """Return the error of reading a spoilt folder on this rank; `later`: it is spoilt once the module exists."""
    mine = f"{folder}/{torch_dist.get_rank()}"  # as on machines with disks of their own
    write_model("llama", folder, num_layers=4, max_shard_size="50KB")
    shutil.copytree(folder, mine, ignore=lambda *_: ["0", "1"])
    is_spoilt = torch_dist.get_rank() == 1 or not on_one_rank
    if adapter := mine if "adapter" in how else None:
        from peft import LoraConfig, get_peft_model

        model = AutoModelForCausalLM.from_pretrained(mine)
        torch.manual_seed(4)
        get_peft_model(model, LoraConfig(target_modules=["q_proj"])).save_pretrained(mine)

    def build() -> None:
        if is_spoilt and how.endswith(".safetensors"):  # other values in that file
            state = load_file(f"{mine}/{how}")
            save_file({name: value + 1 for name, value in state.items()}, f"{mine}/{how}", metadata={"format": "pt"})
        elif is_spoilt and not later:
            spoilt(mine, how)
        module = terapipe_ds.from_pretrained(mine, num_stages=2, adapter=adapter)
        if is_spoilt and later:
            for file in Path(mine).glob("model-*"):
                file.unlink()
        terapipe_ds.initialize(model=module, config=engines.config() | {"terapipe": engines.section()})

    return engines.raised_by(build)


def more_than_the_model(folder: str, key: str) -> tuple[list[str], tuple[str, str]]:
    """Return the log and the error on this rank if files have one tensor more."""
    write_model("qwen2" if "bias" in key else "gpt2", folder)
    if torch_dist.get_rank() == 0:
        path = Path(folder, SINGLE)
        state = load_file(path)
        save_file({**state, key: torch.ones(64, 32)}, path, metadata={"format": "pt"})
    torch_dist.barrier()
    with engines.logged() as lines:
        raised = engines.raised_by(lambda: terapipe_ds.from_pretrained(folder, num_stages=2))
    return lines, raised


def save_apart(folder: str) -> tuple[str, str]:
    """Return a save's error on this rank if each rank has its own folder, as on disks that machines do not share."""
    write_model("llama", f"{folder}/first", num_layers=4)
    module = terapipe_ds.from_pretrained(f"{folder}/first", num_stages=2)
    with engine_of(module, engines.section()) as engine:
        return engines.raised_by(lambda: terapipe_ds.save_pretrained(engine, f"{folder}/{torch_dist.get_rank()}"))


def private_bytes() -> int:
    """Return the bytes of this process's memory that belong to no file."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    fields = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines[1:]}
    return fields["Anonymous"]


def memory_of_reading(folder: str, schedule: str, **fields: Any) -> tuple[int, int]:
    """Return the largest growth of private memory while a model is read over two stages, and the bytes of the model."""
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
    terapipe_ds.lay_out(module, engines.config() | {"terapipe": engines.section(schedule=schedule)})
    stop.set()
    watcher.join()
    assert sum(p.numel() for p in module.parameters()) * 4 > size / 6
    return max(peak[0], private_bytes()) - before, size
