"""Train a model of Hugging Face from random weights over pipeline stages, in token slices, on text that is streamed.

The model is that of a `config.json` of transformers, or a tiny Llama. It evaluates now and then on rows of the text
that are not trained on, and keeps checkpoints from which `--resume` goes on. It writes a folder that
`AutoModelForCausalLM.from_pretrained` and `finetune_hf.py --model` read. Needs transformers.
"""

from __future__ import annotations

import argparse
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
from hf_data import TextStream, read_entries, texts_of, tiny_llama, train_tokenizer
from metrics import MetricsFile, draw_losses
from ranks import prepare_rank
from text_data import standard_library, text_files
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

import terapipe_ds

HERE = Path(__file__).resolve().parent
VOCAB_SIZE = 4096  # of a tokenizer that is trained here, at most
EXAMPLES = """\
examples:
  a tiny Llama on the source of Python's standard library:
    deepspeed --num_gpus 2 examples/pretrain_hf.py
  another model, text of your own, and on from the newest checkpoint where there is one:
    deepspeed --num_gpus 4 examples/pretrain_hf.py --config config.json --tokenizer FOLDER --data books/ \\
        --stages 4 --sequence-length 4096 --steps 10000 --out run --resume --deepspeed_config ds.json
"""


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options, with the DeepSpeed config read: a dict in `ds_config`."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = Parser(description=__doc__, epilog=EXAMPLES, formatter_class=formatter, allow_abbrev=False)
    default = str(HERE.parent / "configs/hf_tiny.json")
    parser.add_argument(
        "--deepspeed_config", metavar="FILE.json", default=default, help="default: configs/hf_tiny.json"
    )
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)  # the launcher gives it
    parser.add_argument("--stages", type=int, default=2, help="of the pipeline; more ranks make replicas of it")
    parser.add_argument("--seed", type=int, default=1234, help="of weights and dropout")
    parser.add_argument("--pin", action=argparse.BooleanOptionalAction, default=True, help="CPU ranks to cores")
    parser.add_argument("--config", metavar="PATH", help="config.json of a model, or its folder; default: a tiny Llama")
    tokenizers = "a folder with a tokenizer; default: one is trained on the beginning of the text, and kept in --out"
    parser.add_argument("--tokenizer", metavar="FOLDER", help=tokenizers)

    data = parser.add_argument_group("data")
    sources = (
        'text files, .jsonl files with {"text": ...} in each line, or directories of them; '
        "default: the source of Python's standard library"
    )
    data.add_argument("--data", nargs="+", default=(), metavar="PATH", help=sources)
    data.add_argument("--sequence-length", type=int, default=256)

    run = parser.add_argument_group("run")
    run.add_argument("--steps", type=int, default=100, help="optimizer steps in all, resumed ones included")
    run.add_argument("--eval-every", type=int, default=50, help="steps; 0: at the end only")
    run.add_argument("--eval-batches", type=int, default=4, help="each as large as a training batch")
    run.add_argument("--out", default="out/pretrain_hf", metavar="DIR", help="for checkpoints, tokenizer and model")
    run.add_argument("--save-every", type=int, default=50, help="steps; 0: at the end only")
    run.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --out")
    run.add_argument("--metrics", metavar="FILE.jsonl", help="one line per step and evaluation")
    run.add_argument("--plot", metavar="FILE.png", help="loss curves, drawn at the end; default: none")
    args = parser.parse_args(arguments)
    if args.steps < 1:
        parser.error("--steps is 1 or more")
    if min(args.eval_every, args.save_every) < 0:
        parser.error("--eval-every and --save-every: give 0 or more steps")
    try:
        args.ds_config = json.loads(Path(args.deepspeed_config).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        parser.error(f"--deepspeed_config {args.deepspeed_config} cannot be read: {error}")
    if args.sequence_length < 2:
        parser.error("--sequence-length is 2 or more: each token is trained on the next one")
    ranks = int(os.environ.get("WORLD_SIZE", args.stages))  # the launcher sets it
    if args.stages < 1 or ranks % args.stages:
        parser.error(f"{ranks} ranks do not divide by --stages {args.stages}: start a multiple of it by --num_gpus")
    return args


def make_tokenizer(args: argparse.Namespace, files: Sequence[Path]) -> Path:
    """Train a tokenizer on a million characters, or where a run goes on take the one that it had; return its folder."""
    folder = Path(args.out, "tokenizer")
    is_there = args.resume and (folder / "tokenizer.json").exists()
    deepspeed.comm.barrier()  # before a rank writes it
    if is_there:
        return folder
    texts, size = list[str](), 0
    for text in texts_of(read_entries(files)):  # on all ranks, so that all hear of a file that is no text
        texts.append(text[: 1_000_000 - size])
        size += len(texts[-1])
        if size >= 1_000_000:
            break
    if deepspeed.comm.get_rank() == 0:
        train_tokenizer(texts, VOCAB_SIZE).save_pretrained(folder)
    deepspeed.comm.barrier()
    return folder


def build_engine(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> deepspeed.PipelineEngine:
    config = tiny_llama(tokenizer) if args.config is None else AutoConfig.from_pretrained(args.config)
    text_config = config.get_text_config()
    positions = getattr(text_config, "max_position_embeddings", None) or args.sequence_length
    if args.sequence_length > positions:
        raise ValueError(f"--sequence-length {args.sequence_length} is more than the model's {positions} positions")
    if len(tokenizer) > text_config.vocab_size:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens and the model {text_config.vocab_size}: give the config a "
            "vocab_size that is as large, or another --tokenizer"
        )
    text_config.bos_token_id, text_config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    module = terapipe_ds.from_config(config, num_stages=args.stages, dtype=torch.float32, seed=args.seed)
    engine, *_ = terapipe_ds.initialize(model=module, model_parameters=module.parameters(), config=args.ds_config)
    return engine


class Data:
    """The rows of the text for this rank's replica, as micro-batches."""

    def __init__(self, args: argparse.Namespace, files: Sequence[Path], tokenizer: Any, engine: Any) -> None:
        grid = engine.grid
        self.engine, self.stream = engine, (files, tokenizer, args.sequence_length)
        next(iter(TextStream(*self.stream)))  # ValueError where there is too little text, on all ranks
        self.share = {"replica_id": grid.get_data_parallel_rank(), "num_replicas": grid.get_data_parallel_world_size()}
        self.is_sliced = args.ds_config.get("terapipe", {}).get("enabled", False)

    def training(self) -> Iterator[Any]:
        """Return the micro-batches from the first row on that no step has used yet."""
        return self._micro_batches(first_row=self.engine.global_samples)  # which checkpoints keep

    def held_out(self) -> Iterator[Any]:
        """Return the same micro-batches every time, so that losses can be compared."""
        return self._micro_batches(held_out=True)

    def _micro_batches(self, **which: Any) -> Iterator[Any]:
        stream = TextStream(*self.stream, **self.share, **which)
        dicts = DataLoader(stream, batch_size=self.engine.train_micro_batch_size_per_gpu())
        # DeepSpeed's own engine takes tuples with shifted labels
        return iter(dicts) if self.is_sliced else map(self.engine.module.to_tuple, dicts)


def evaluate(args: argparse.Namespace, engine: deepspeed.PipelineEngine, data: Data) -> float:
    """Return the mean loss of the same held-out rows every time."""
    held_out = data.held_out()
    return sum(engine.eval_batch(held_out).item() for _ in range(args.eval_batches)) / args.eval_batches


def is_due(step: int, every: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)


def train(args: argparse.Namespace, engine: deepspeed.PipelineEngine, data: Data, metrics: MetricsFile) -> None:
    is_first, first_step = deepspeed.comm.get_rank() == 0, engine.global_steps
    tokens, batches = engine.train_batch_size() * args.sequence_length, data.training()
    progress = tqdm(total=args.steps, initial=first_step, unit="step", file=sys.stdout, disable=not is_first)
    for step in range(first_step + 1, args.steps + 1):
        begin = time.perf_counter()
        loss = engine.train_batch(data_iter=batches).item()
        seconds = time.perf_counter() - begin
        metrics.record(step=step, loss=loss, seconds=seconds)
        progress.set_postfix_str(f"loss {loss:.4f}, {tokens / seconds:,.0f} tokens/s", refresh=False)
        progress.update()
        if args.eval_batches > 0 and is_due(step, args.eval_every, args.steps):
            held_out_loss = evaluate(args, engine, data)
            metrics.record(step=step, validation_loss=held_out_loss)
            if is_first:
                progress.write(f"step {step}: held-out loss {held_out_loss:.4f}", file=sys.stdout)
        if is_due(step, args.save_every, args.steps):
            engine.save_checkpoint(str(Path(args.out, "checkpoints")), client_state={"metrics": metrics.entries})
    progress.close()


def run(args: argparse.Namespace) -> MetricsFile:
    """All of a training, between the start and the end of torch.distributed."""
    is_first, state = deepspeed.comm.get_rank() == 0, None
    try:
        files = list(text_files(args.data)) if args.data else standard_library()
        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer or make_tokenizer(args, files))
        engine = build_engine(args, tokenizer)
        if args.resume:  # a new run begins where there is no checkpoint yet
            _, state = engine.load_checkpoint(str(Path(args.out, "checkpoints")))
        data = Data(args, files, tokenizer, engine)
    except (OSError, ValueError) as error:
        end_with(str(error))
    if is_first:
        print(f"{type(engine).__name__}, {args.stages} stages x {engine.dp_world_size} replicas, {len(files)} files")

    metrics = MetricsFile(args.metrics if is_first else None, earlier=(state or {}).get("metrics", ()))
    train(args, engine, data, metrics)
    folder = Path(args.out, "model")
    terapipe_ds.save_pretrained(engine, folder)
    if is_first:
        tokenizer.save_pretrained(folder)
        print(f"exported: {folder}")
        if args.plot:
            print(f"loss curves: {draw_losses(args.plot, {'': metrics.entries}, 'a model from a config', 'token')}")
    engine.destroy()
    return metrics


def main() -> None:
    args = parse_arguments()
    prepare_rank(pin=args.pin)
    deepspeed.init_distributed()
    torch.manual_seed(args.seed + deepspeed.comm.get_rank())  # for dropout; weights have random numbers of their own
    run(args)
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main()
