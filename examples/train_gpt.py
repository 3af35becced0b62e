"""Train a byte-level GPT on text over pipeline stages, with DeepSpeed's stock engine or in token slices.

    deepspeed --num_gpus 2 examples/train_gpt.py --deepspeed_config configs/stock.json
    deepspeed --num_gpus 2 examples/train_gpt.py --deepspeed_config configs/sliced_8.json

The two differ in the config file alone: the second one has a ``terapipe`` section. On a machine without
accelerators put ``DS_ACCELERATOR=cpu OMP_NUM_THREADS=1`` in front. Where the section names a ``strategy``, the
grid is the strategy's.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
from command_line import Parser, end_with
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.topology import ProcessTopology
from metrics import MetricsFile, draw_losses
from ranks import prepare_rank
from text_data import VOCAB_SIZE, Corpus, number_of_windows, training_batches, validation_batches
from tqdm import tqdm

import terapipe_ds
from terapipe_ds.models.gpt import GPTConfig, gpt_layers, gpt_loss
from terapipe_ds.planner.strategy import Strategy


def parse_arguments() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--deepspeed_config", required=True, metavar="FILE.json", help="DeepSpeed's configuration")
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)  # the launcher gives it
    parser.add_argument("--pipeline-stages", type=int, help="default: as many as ranks, no data parallelism")
    parser.add_argument("--sequence-parallel", type=int, default=1, metavar="N", help="ranks that divide each slice")
    parser.add_argument("--partition-method", default="type:DecoderLayer", help="how layers are shared out to stages")
    parser.add_argument("--seed", type=int, default=1234, help="of weights, samples and dropout")
    parser.add_argument("--pin", action=argparse.BooleanOptionalAction, default=True, help="CPU ranks to cores")

    model = parser.add_argument_group("model")
    model.add_argument("--model", default="tiny", help="a name in terapipe_ds.costs; the options replace parts")
    model.add_argument("--num-layers", type=int)
    model.add_argument("--hidden-size", type=int)
    model.add_argument("--num-heads", type=int)
    model.add_argument("--num-kv-heads", type=int)
    model.add_argument("--ffn-size", type=int)
    model.add_argument("--positions", choices=("rope", "learned"))
    model.add_argument("--tied-embedding", action=argparse.BooleanOptionalAction)
    model.add_argument("--dropout", type=float)
    model.add_argument("--attention-dropout", type=float, help="default: as --dropout")

    data = parser.add_argument_group("data")
    sources = "text files or directories; default: the source of Python's standard library"
    data.add_argument("--data", nargs="+", default=(), metavar="PATH", help=sources)
    data.add_argument("--max-bytes", type=int, default=4 << 20, help="read no more text than this")
    data.add_argument("--validation-fraction", type=float, default=0.05, help="of the text, its end")
    data.add_argument("--sequence-length", type=int, default=1024)

    run = parser.add_argument_group("run")
    run.add_argument("--steps", type=int, default=200, help="optimizer steps in all, resumed ones included")
    run.add_argument("--eval-every", type=int, default=50, help="steps; 0: at the end only")
    run.add_argument("--eval-batches", type=int, default=4, help="each as large as a training batch")
    run.add_argument("--save-dir", metavar="DIR", help="where checkpoints go; default: none are written")
    run.add_argument("--save-every", type=int, default=0, help="steps; 0: at the end only")
    run.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --save-dir")
    run.add_argument("--metrics", metavar="FILE.jsonl", help="one line per step: loss and seconds")
    run.add_argument("--plot", default="out/loss.png", metavar="FILE.png", help="loss curves, drawn at the end")
    args = parser.parse_args()
    if min(args.steps, args.eval_batches) < 1:  # the last step evaluates, before it is saved
        parser.error("--steps and --eval-batches are 1 or more")
    if not 0 < args.validation_fraction < 1:
        parser.error("--validation-fraction is a share between 0 and 1")
    if min(args.eval_every, args.save_every) < 0:
        parser.error("--eval-every and --save-every: give 0 or more steps")
    if args.resume and not args.save_dir:
        parser.error("--resume needs --save-dir, the directory with the checkpoints")
    return args


def load_text(args: argparse.Namespace) -> Corpus:
    """Return the text. End here if a part of it is too short: the first evaluation may be hours away."""
    try:
        corpus = Corpus.load(args.data, max_bytes=args.max_bytes, validation_fraction=args.validation_fraction)
        for tokens in (corpus.train, corpus.validation):
            number_of_windows(tokens, args.sequence_length)
    except (OSError, ValueError) as error:
        end_with(str(error))
    return corpus


def build_model(args: argparse.Namespace, num_stages: int, topology: ProcessTopology | None = None) -> PipelineModule:
    fields = GPTConfig.model_fields.keys() - {"seed"}
    overrides = {name: value for name, value in vars(args).items() if name in fields and value is not None}
    config = GPTConfig.from_name(
        args.model,
        vocab_size=VOCAB_SIZE,
        max_sequence_length=args.sequence_length,
        seed=args.seed,
        **overrides,
    )
    return PipelineModule(
        layers=gpt_layers(config),
        num_stages=None if topology is not None else num_stages,
        topology=topology,
        loss_fn=gpt_loss,
        partition_method=args.partition_method,
    )


def planned_topology(config: dict[str, Any]) -> ProcessTopology | None:
    """The grid of the strategy that a config names; None where it names none."""
    path = config.get("terapipe", {}).get("strategy")
    return None if path is None else terapipe_ds.topology_of(Strategy.from_json(Path(path).read_bytes()))


def sequence_topology(args: argparse.Namespace, world_size: int) -> ProcessTopology | None:
    """The grid with ranks that divide each slice (docs/sequence_parallel.md); None without them."""
    size = args.sequence_parallel
    if size == 1:
        return None
    stages = args.pipeline_stages or world_size // size
    return ProcessTopology(axes=["pipe", "data", "sequence"], dims=[stages, world_size // (stages * size), size])


def grid_of(args: argparse.Namespace, config: dict[str, Any], world_size: int) -> ProcessTopology | None:
    """The grid of a strategy or with sequence ranks; None where stages and replicas are all."""
    planned = planned_topology(config)
    if planned and (args.pipeline_stages or args.sequence_parallel > 1):
        end_with("terapipe.strategy in the config has the grid: leave --pipeline-stages and --sequence-parallel out")
    topology = planned or sequence_topology(args, world_size)
    if topology is not None:
        terapipe_ds.register()  # or the constructor of a module with tied layers waits for ever on sequence ranks
    return topology


def build_engine(config: dict[str, Any], model: PipelineModule) -> deepspeed.PipelineEngine:
    # terapipe_ds.initialize alone would do: without a `terapipe` section it returns DeepSpeed's own engine as
    # well. Said in two words so that nobody who measures the stock engine has to take our word for it.
    initialize = terapipe_ds.initialize if "terapipe" in config else deepspeed.initialize
    engine, *_ = initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def evaluate(args: argparse.Namespace, engine: deepspeed.PipelineEngine, corpus: Corpus) -> float:
    """Mean loss of the same samples of the validation text every time."""
    batches = validation_batches(
        corpus.validation,
        args.sequence_length,
        engine.train_micro_batch_size_per_gpu(),
        num_micro_batches=args.eval_batches * engine.gradient_accumulation_steps(),
        **share_of_replica(engine),
    )
    losses = [engine.eval_batch(batches).item() for _ in range(args.eval_batches)]
    return sum(losses) / len(losses)


def share_of_replica(engine: deepspeed.PipelineEngine) -> dict[str, int]:
    grid = engine.grid
    return {"replica_id": grid.get_data_parallel_rank(), "num_replicas": grid.get_data_parallel_world_size()}


def is_due(step: int, every: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)


def main() -> None:
    args = parse_arguments()
    try:
        config = json.loads(Path(args.deepspeed_config).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        end_with(f"--deepspeed_config {args.deepspeed_config} cannot be read: {error}")
    prepare_rank(pin=args.pin)
    deepspeed.init_distributed()
    rank, world_size = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    torch.manual_seed(args.seed + rank)  # for dropout; weights and samples have random numbers of their own

    corpus = load_text(args)
    topology = grid_of(args, config, world_size)
    engine = build_engine(config, build_model(args, args.pipeline_stages or world_size, topology))
    state = None
    if args.resume:
        _, state = engine.load_checkpoint(args.save_dir)  # a new run begins where there is no checkpoint yet
    first_step = engine.global_steps
    metrics = MetricsFile(args.metrics if rank == 0 else None, earlier=(state or {}).get("metrics", ()))
    batches = training_batches(
        corpus.train,
        args.sequence_length,
        engine.train_micro_batch_size_per_gpu(),
        seed=args.seed,
        first_micro_batch=first_step * engine.gradient_accumulation_steps(),
        **share_of_replica(engine),
    )
    if rank == 0:
        print(f"{type(engine).__name__}; {corpus.num_files} files, {len(corpus.train):,} bytes to train on")

    tokens = engine.train_batch_size() * args.sequence_length
    progress = tqdm(total=args.steps, initial=first_step, unit="step", file=sys.stdout, disable=rank != 0)
    for step in range(first_step + 1, args.steps + 1):
        begin = time.perf_counter()
        loss = engine.train_batch(data_iter=batches).item()
        seconds = time.perf_counter() - begin
        metrics.record(step=step, loss=loss, seconds=seconds)
        progress.set_postfix_str(f"loss {loss:.4f}, {tokens / seconds:,.0f} tokens/s", refresh=False)
        progress.update()
        if is_due(step, args.eval_every, args.steps):
            validation_loss = evaluate(args, engine, corpus)
            metrics.record(step=step, validation_loss=validation_loss)
            if rank == 0:
                progress.write(f"step {step}: validation loss {validation_loss:.4f}", file=sys.stdout)
        if args.save_dir and is_due(step, args.save_every, args.steps):
            engine.save_checkpoint(args.save_dir, client_state={"metrics": metrics.entries})
    progress.close()

    if rank == 0 and args.plot:
        title = f"{args.model}, {engine.num_stages} pipeline stages, {Path(args.deepspeed_config).name}"
        print(f"loss curves: {draw_losses(args.plot, {'': metrics.entries}, title)}")
    engine.destroy()
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main()
