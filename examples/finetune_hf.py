"""Fine-tune a model of Hugging Face over pipeline stages, in token slices: all its weights, or LoRA adapters.

It evaluates on held-out data before and after, writes a folder for `AutoModelForCausalLM.from_pretrained`, and
generates a text from that folder. Of chats only what the assistant says is trained. Without `--model` a tiny Llama of
random weights takes its place, with a tokenizer that is trained on the data. Needs transformers and peft.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
from command_line import Parser, end_with
from hf_data import (
    Entry,
    Row,
    batches,
    documents_of,
    packed,
    read_entries,
    split,
    texts_of,
    tiny_llama,
    train_tokenizer,
    training_rows,
)
from metrics import MetricsFile
from ranks import prepare_rank
from text_data import text_files
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

import terapipe_ds

HERE = Path(__file__).resolve().parent
EXAMPLES = """\
examples:
  a tiny model and a few chats, on two GPUs or two cores of a CPU; a minute or two:
    deepspeed --num_gpus 2 examples/finetune_hf.py
  a model and chats of your own, with adapters and packed rows:
    deepspeed --num_gpus 2 examples/finetune_hf.py --model PATH_OR_NAME --data chats.jsonl --lora 16 --pack
  all its weights, on text, over four stages on eight GPUs (two replicas):
    deepspeed --num_gpus 8 examples/finetune_hf.py --model FOLDER --data books/ --stages 4 --steps 1000
"""


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options, with the DeepSpeed config read: a dict in `ds_config`."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = Parser(description=__doc__, epilog=EXAMPLES, formatter_class=formatter, allow_abbrev=False)
    configs = "default: configs/hf_tiny.json without --model, else configs/finetune_hf.json, or ..._lora.json"
    parser.add_argument("--deepspeed_config", metavar="FILE.json", help=configs)
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)  # the launcher gives it
    parser.add_argument("--stages", type=int, default=2, help="of the pipeline; more ranks make replicas of it")
    parser.add_argument("--seed", type=int, default=1234, help="of the data's order, adapters and dropout")
    parser.add_argument("--pin", action=argparse.BooleanOptionalAction, default=True, help="CPU ranks to cores")

    model = parser.add_argument_group("model")
    names = "a folder with config, safetensors and tokenizer, a name on the Hugging Face hub, or a folder of adapters"
    model.add_argument("--model", metavar="PATH_OR_NAME", help=names)
    model.add_argument("--lora", type=int, metavar="RANK", help="train adapters of this rank in place of the weights")
    targets = "modules that get adapters; default: all linear layers but the output matrix"
    model.add_argument("--lora-targets", nargs="+", default="all-linear", metavar="NAME", help=targets)

    data = parser.add_argument_group("data")
    sources = 'text files, directories of them, or .jsonl files with {"messages": [{"role", "content"}]} in each line'
    data.add_argument("--data", nargs="+", default=[str(HERE / "data/chats.jsonl")], metavar="PATH", help=sources)
    data.add_argument(
        "--sequence-length", type=int, help="most tokens of a row; default: 1024, or the model's positions"
    )
    data.add_argument("--pack", action="store_true", help="several whole documents in a row, each as if it were alone")
    data.add_argument("--held-out", type=float, default=0.1, metavar="SHARE", help="of the documents, to evaluate on")
    data.add_argument("--eval-rows", type=int, default=64, help="rows of the held-out share that are used at most")

    run = parser.add_argument_group("run")
    run.add_argument("--steps", type=int, default=150, help="optimizer steps")
    run.add_argument("--eval-every", type=int, default=0, help="steps; 0: before and after the training only")
    run.add_argument("--out", metavar="FOLDER", help="of the result; default: out/finetune_hf or out/finetune_hf_lora")
    run.add_argument("--prompt", help="what the text at the end is to answer; default: a prompt of the training data")
    run.add_argument("--new-tokens", type=int, default=48, help="to generate at the end at most; 0: nothing")
    run.add_argument("--metrics", metavar="FILE.jsonl", help="one line per step and evaluation")
    args = parser.parse_args(arguments)
    if args.steps < 1 or args.eval_every < 0:
        parser.error(f"give --steps 1 or more (now {args.steps}), and --eval-every 0 or more (now {args.eval_every})")
    goes_on = args.model is not None and Path(args.model, "adapter_config.json").exists()
    if goes_on and args.lora is not None:
        parser.error(f"--model {args.model} has adapters, and the run goes on with these: leave out --lora")
    has_adapters = goes_on or args.lora is not None
    args.out = args.out or f"out/finetune_hf{'_lora' * has_adapters}"
    is_base = args.model is not None and Path(args.out).resolve() == Path(args.model).resolve()
    if has_adapters and not is_base and Path(args.out, "config.json").exists():
        parser.error(
            f"--out {args.out} has a whole model: transformers would put the adapters onto it; give another one"
        )
    name = "hf_tiny" if args.model is None else "finetune_hf_lora" if has_adapters else "finetune_hf"
    file = Path(args.deepspeed_config or HERE.parent / "configs" / f"{name}.json")
    try:
        args.ds_config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        parser.error(f"--deepspeed_config {file} cannot be read: {error}")
    if not 0 < args.held_out < 1 or args.eval_rows < 1:
        parser.error("--held-out is a share between 0 and 1, and --eval-rows is 1 or more")
    ranks = int(os.environ.get("WORLD_SIZE", args.stages))  # the launcher sets it
    if args.stages < 1 or ranks % args.stages:
        parser.error(f"{ranks} ranks do not divide by --stages {args.stages}: start a multiple of it by --num_gpus")
    if args.pack:
        if not args.ds_config.get("terapipe", {}).get("enabled"):
            parser.error(
                "--pack needs an enabled terapipe section in the config: other engines would mix the documents"
            )
        args.ds_config["terapipe"].setdefault("documents", "position_ids")
    return args


# -- model -----------------------------------------------------------------------------------------------------


def model_folder(name: str) -> Path:
    """Return the folder of a model. One that is a name goes into the cache of Hugging Face first, on each machine."""
    if Path(name).exists():
        return Path(name).resolve()
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
    try:
        try:
            if os.environ.get("LOCAL_RANK", "0") == "0":
                snapshot_download(name, allow_patterns=patterns)
        finally:
            deepspeed.comm.barrier()
        return Path(snapshot_download(name, allow_patterns=patterns, local_files_only=True))
    except Exception as error:  # of many kinds: no such name, no network, no right to read it
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"--model {name} is no folder, and cannot be downloaded: {reason}") from error


def make_tiny_model(folder: Path, entries: Sequence[Entry], seed: int) -> Path:
    """Write a tiny model of random weights and a tokenizer that is trained on the data; return the folder."""
    if deepspeed.comm.get_rank() == 0:
        tokenizer = train_tokenizer(texts_of(entries), vocab_size=1024)
        tokenizer.save_pretrained(folder)
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(tiny_llama(tokenizer)).save_pretrained(folder)
    deepspeed.comm.barrier()
    return folder.resolve()


def row_length(asked: int | None, config: Any) -> int:
    """Return the most tokens of a row, which the model must have positions for."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if asked is None:
        return min(1024, positions or 1024)
    if asked < 2 or (positions is not None and asked > positions):
        raise ValueError(
            f"--sequence-length {asked} must be from 2 to the model's positions, {positions or 'any number'}"
        )
    return asked


def build_module(args: argparse.Namespace, folder: Path) -> deepspeed.PipelineModule:
    """Return the model in a folder, or the one that adapters in it are for. Its weights are read later."""
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    enabled = [dtype for key, dtype in dtypes.items() if args.ds_config.get(key, {}).get("enabled")]
    adapter = None
    if args.lora is not None:
        from peft import LoraConfig

        adapter = LoraConfig(
            r=args.lora, lora_alpha=2 * args.lora, target_modules=args.lora_targets, task_type="CAUSAL_LM"
        )
    return terapipe_ds.from_pretrained(
        folder, num_stages=args.stages, dtype=enabled[0] if enabled else torch.float32, adapter=adapter, seed=args.seed
    )


def build_engine(args: argparse.Namespace, module: deepspeed.PipelineModule) -> deepspeed.PipelineEngine:
    """Return the engine of a model; each stage reads the weights of its own layers."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    engine, *_ = terapipe_ds.initialize(model=module, model_parameters=trained, config=args.ds_config)
    return engine


# -- data ------------------------------------------------------------------------------------------------------


class Data:
    """Rows to train on and held-out ones, and their batches for this rank's replica."""

    def __init__(
        self, args: argparse.Namespace, entries: Sequence[Entry], tokenizer: PreTrainedTokenizerBase, config: Any
    ) -> None:
        length, vocab_size = row_length(args.sequence_length, config), config.get_text_config().vocab_size
        documents, self.remark = documents_of(entries, tokenizer, length)
        largest = max(max(document.tokens) for document in documents)
        if largest >= vocab_size:
            raise ValueError(
                f"the tokenizer gives token {largest}, and the model has {vocab_size}: give its own "
                "tokenizer, or resize its embeddings"
            )
        training, held_out = split(documents, args.held_out, args.seed)
        self.prompt = training[0].prompt
        rows_of = (lambda those: packed(those, length)) if args.pack else (lambda those: [[each] for each in those])
        self.training, self.held_out = rows_of(training), rows_of(held_out)[: args.eval_rows]
        self.size = len(training)
        pad = tokenizer.pad_token_id or 0  # any token would do: padding is not attended to, and does not count
        self.is_sliced = args.ds_config.get("terapipe", {}).get("enabled", False)
        # few lengths, for slices are planned for each; DeepSpeed's own engine takes one alone
        self.form = {"length": length, "multiple": 32 if self.is_sliced else length, "pad": pad}
        self.form["with_positions"] = args.pack

    def batches(self, engine: deepspeed.PipelineEngine, rows: Iterator[Row]) -> Iterator[Any]:
        """Return dicts with labels that are not shifted; for DeepSpeed's own engine tuples with shifted ones."""
        grid = engine.grid
        share = {"replica_id": grid.get_data_parallel_rank(), "num_replicas": grid.get_data_parallel_world_size()}
        dicts = batches(rows, engine.train_micro_batch_size_per_gpu(), **share, **self.form)
        return dicts if self.is_sliced else map(engine.module.to_tuple, dicts)

    def evaluate(self, engine: deepspeed.PipelineEngine) -> float:
        """Return the mean loss of the held-out rows; some come twice where they do not fill the last batch."""
        held_out = self.batches(engine, itertools.cycle(self.held_out))
        steps = -(-len(self.held_out) // engine.train_batch_size())
        return sum(engine.eval_batch(held_out).item() for _ in range(steps)) / steps


# -- the run ---------------------------------------------------------------------------------------------------


def train(args: argparse.Namespace, engine: deepspeed.PipelineEngine, data: Data, metrics: MetricsFile) -> None:
    is_first = deepspeed.comm.get_rank() == 0
    batches_of_run = data.batches(engine, training_rows(data.training, args.seed))
    progress = tqdm(total=args.steps, unit="step", file=sys.stdout, disable=not is_first)
    for step in range(args.steps + 1):
        if step > 0:
            begin = time.perf_counter()
            loss = engine.train_batch(data_iter=batches_of_run).item()
            metrics.record(step=step, loss=loss, seconds=time.perf_counter() - begin)
            progress.set_postfix_str(f"loss {loss:.4f}", refresh=False)
            progress.update()
        if step in (0, args.steps) or (args.eval_every and step % args.eval_every == 0):
            held_out_loss = data.evaluate(engine)
            metrics.record(step=step, validation_loss=held_out_loss)
            if is_first:
                progress.write(f"step {step}: held-out loss {held_out_loss:.4f}", file=sys.stdout)
    progress.close()


def generate(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int]) -> str:
    """Return a text by the exported model, on the CPU: one device may be too small for all stages.

    transformers puts adapters onto the model that they were trained with.
    """
    model = AutoModelForCausalLM.from_pretrained(args.out)
    tokens = torch.tensor([list(prompt)])
    options = {"max_new_tokens": args.new_tokens, "do_sample": False, "pad_token_id": tokenizer.pad_token_id or 0}
    out = model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
    return tokenizer.decode(out[0, len(prompt) :], skip_special_tokens=True)


def prompt_of(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, data: Data) -> Sequence[int]:
    if args.prompt is None:
        return data.prompt
    if tokenizer.chat_template is None:
        return tokenizer(args.prompt)["input_ids"]
    messages = [{"role": "user", "content": args.prompt}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]


def run(args: argparse.Namespace) -> MetricsFile:
    """All of a training, between the start and the end of torch.distributed."""
    is_first = deepspeed.comm.get_rank() == 0
    try:
        entries = list(read_entries(text_files(args.data)))
        start = Path(args.out, "start")
        folder = model_folder(args.model) if args.model else make_tiny_model(start, entries, args.seed)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        module = build_module(args, folder)
        data = Data(args, entries, tokenizer, module.config)
        engine = build_engine(args, module)
    except (OSError, ValueError) as error:
        end_with(str(error))
    if is_first:
        print(f"{type(engine).__name__}, {args.stages} stages, data parallel {engine.dp_world_size}; {data.remark}")
        print(f"{data.size} documents in {len(data.training)} rows to train on, {len(data.held_out)} rows held out")

    metrics = MetricsFile(args.metrics if is_first else None)
    train(args, engine, data, metrics)
    terapipe_ds.save_pretrained(engine, args.out)
    engine.destroy()
    if is_first:
        tokenizer.save_pretrained(args.out)
        print(f"exported: {args.out}")
        if args.new_tokens > 0:
            prompt = prompt_of(args, tokenizer, data)
            print(f"prompt: {tokenizer.decode(prompt)!r}")
            print(f"generated: {generate(args, tokenizer, prompt)!r}")
    deepspeed.comm.barrier()
    return metrics


def main() -> None:
    args = parse_arguments()
    prepare_rank(pin=args.pin)
    deepspeed.init_distributed()
    torch.manual_seed(args.seed + deepspeed.comm.get_rank())  # for dropout
    run(args)
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main()
