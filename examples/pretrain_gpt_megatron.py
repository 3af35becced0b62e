"""Train a GPT of megatron-core layers on text: tensor, pipeline and data parallel, in token slices.

    deepspeed --num_gpus 4 examples/pretrain_gpt_megatron.py --tensor-parallel 2 --pipeline-parallel 2 \\
        --deepspeed_config configs/gpt_tp2_pp2.json

On a machine without accelerators put `DS_ACCELERATOR=cpu OMP_NUM_THREADS=1` in front. Without `--data-path` the
text is the source of Python's standard library. Needs `pip install megatron-core==0.16.1`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F
from command_line import end_with
from megatron_arguments import parse_arguments
from metrics import MetricsFile, draw_losses
from ranks import prepare_rank
from text_data import standard_library
from tqdm import tqdm

import terapipe_ds
from terapipe_ds import compat

Batches = Iterator[Any] | None  # of ((tokens, position_ids), (labels, loss_mask)), each [B, L]; None in middle stages


def build_model(args: argparse.Namespace, vocab_size: int) -> Any:
    from terapipe_ds.models.megatron import MegatronGPT

    return MegatronGPT(
        transformer_config(args),
        vocab_size=padded(vocab_size, args.make_vocab_size_divisible_by * args.tensor_model_parallel_size),
        max_sequence_length=args.max_position_embeddings,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
        rotary_percent=args.rotary_percent,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        seed=args.seed,
    )


def transformer_config(args: argparse.Namespace) -> Any:
    """megatron-core's config of the options, as `core_transformer_config_from_args` of Megatron-LM has it."""
    from megatron.core.transformer import TransformerConfig

    dtype = parameter_dtype(args.ds_config)
    return TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size or default_ffn_size(args.hidden_size, args.swiglu),
        num_attention_heads=args.num_attention_heads,
        num_query_groups=(args.num_query_groups or 1) if args.group_query_attention else None,
        kv_channels=args.kv_channels,
        normalization=args.normalization,
        layernorm_epsilon=args.norm_epsilon,
        gated_linear_unit=args.swiglu,
        activation_func=F.silu if args.swiglu else F.gelu,
        add_bias_linear=not args.disable_bias_linear,
        qk_layernorm=args.qk_layernorm,
        init_method_std=args.init_method_std,
        use_cpu_initialization=args.use_cpu_initialization,
        hidden_dropout=args.hidden_dropout,
        attention_dropout=args.attention_dropout,
        transformer_impl=args.transformer_impl,
        recompute_granularity=args.recompute_granularity,
        recompute_method=args.recompute_method,
        recompute_num_layers=args.recompute_num_layers,
        recompute_modules=args.recompute_modules,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        sequence_parallel=args.sequence_parallel and args.tensor_model_parallel_size > 1,  # as Megatron-LM sets it
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        cuda_graph_scope=[],  # its default is deprecated, with a warning
    )


def parameter_dtype(ds_config: dict[str, Any]) -> torch.dtype:
    for section, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if ds_config.get(section, {}).get("enabled"):
            return dtype
    return torch.float32


def default_ffn_size(hidden_size: int, swiglu: bool) -> int:
    """Megatron-LM's: a gated layer has three matrices in the place of two, so each is smaller."""
    return int(4 * hidden_size * 2 / 3 / 64) * 64 if swiglu else 4 * hidden_size


def padded(vocab_size: int, multiple: int) -> int:
    return -(-vocab_size // multiple) * multiple


class Data:
    """megatron-core's `GPTDataset` for training and validation, on the ranks that read them."""

    def __init__(
        self, args: argparse.Namespace, data_path: Sequence[str], engine: deepspeed.PipelineEngine, tokenizer: Any
    ) -> None:
        from megatron_data import build_datasets

        self.engine, self.eval_iters, self.num_workers = engine, args.eval_iters, args.num_workers
        samples = [steps * engine.train_batch_size() for steps in (args.train_iters, args.eval_iters)]
        reads = engine.is_first_stage() or engine.is_last_stage()
        self.sets = build_datasets(args, data_path, tokenizer, [*samples, 0], reads)

    def training(self) -> Batches:
        """Return the micro-batches from the first sample on that no step has used yet."""
        # kept in checkpoints: batches may have had another size before
        return self._micro_batches(self.sets[0], first_sample=self.engine.global_samples)

    def validation(self) -> Batches:
        """Return the same micro-batches every time, so that losses can be compared."""
        return self._micro_batches(self.sets[1], count=self.eval_iters * self.engine.gradient_accumulation_steps())

    def _micro_batches(self, dataset: Any, **which: int) -> Batches:
        from megatron_data import micro_batches

        return dataset and micro_batches(
            dataset,
            self.engine.train_micro_batch_size_per_gpu(),
            replica_id=self.engine.grid.get_data_parallel_rank(),
            num_replicas=self.engine.grid.get_data_parallel_world_size(),
            num_workers=self.num_workers,
            **which,
        )


def make_data(tokenizer: Any, max_bytes: int = 4 << 20) -> str:
    """Make .bin and .idx files of the source of Python's library, once, on rank 0; return their prefix."""
    from index_text import write_index

    prefix = Path("out", "python-{}.{}-library".format(*sys.version_info))
    if deepspeed.comm.get_rank() == 0 and not Path(f"{prefix}.idx").exists():
        files, size = [], 0
        for file in standard_library():
            size += file.stat().st_size
            if size > max_bytes:
                break
            files.append(file)
        prefix.parent.mkdir(parents=True, exist_ok=True)
        print(f"making {prefix}.bin and .idx from {len(files)} files of Python's library")
        write_index(prefix, files, tokenizer)
    deepspeed.comm.barrier()
    return str(prefix)


def evaluate(engine: deepspeed.PipelineEngine, data: Data) -> float:
    batches = data.validation()
    losses = [engine.eval_batch(batches).item() for _ in range(data.eval_iters)]
    return sum(losses) / len(losses)


def train(args: argparse.Namespace, engine: deepspeed.PipelineEngine, data: Data, metrics: MetricsFile) -> None:
    first_step, rank = engine.global_steps, deepspeed.comm.get_rank()
    tokens = engine.train_batch_size() * args.seq_length
    batches = data.training()
    progress = tqdm(total=args.train_iters, initial=first_step, unit="step", file=sys.stdout, disable=rank != 0)
    for step in range(first_step + 1, args.train_iters + 1):
        begin = time.perf_counter()
        loss = engine.train_batch(data_iter=batches).item()
        seconds = time.perf_counter() - begin
        metrics.record(step=step, loss=loss, seconds=seconds)
        progress.set_postfix_str(f"loss {loss:.4f}, {tokens / seconds:,.0f} tokens/s", refresh=False)
        progress.update()
        last = step == args.train_iters
        if args.eval_iters and (last or step % args.eval_interval == 0):
            validation_loss = evaluate(engine, data)
            metrics.record(step=step, validation_loss=validation_loss)
            if rank == 0:
                progress.write(f"step {step}: loss {loss:.4f}, validation loss {validation_loss:.4f}", file=sys.stdout)
        if args.save and (last or (args.save_interval and step % args.save_interval == 0)):
            engine.save_checkpoint(args.save, client_state={"metrics": metrics.entries})
    progress.close()


def load(args: argparse.Namespace, engine: deepspeed.PipelineEngine) -> dict[str, Any] | None:
    """What was saved beside the newest checkpoint of `--load`, which is loaded; None where a new run begins."""
    if not args.load:
        return None
    path, state = engine.load_checkpoint(args.load, load_module_only=args.finetune)
    if path is None and deepspeed.comm.get_rank() == 0:
        print(f"there is no checkpoint in {args.load}: a new run begins")
    return None if args.finetune else state


def run(args: argparse.Namespace) -> MetricsFile:
    """All of a training, between the start and the end of torch.distributed."""
    from megatron_data import build_tokenizer

    try:
        tokenizer = build_tokenizer(args.tokenizer)
        data_path = [make_data(tokenizer)] if args.data_path is None else args.data_path
        model = build_model(args, tokenizer.vocab_size)
        parameters = [p for p in model.parameters() if p.requires_grad]
        engine, *_ = terapipe_ds.initialize(model=model, model_parameters=parameters, config=args.ds_config)
        data = Data(args, data_path, engine, tokenizer)
        state = load(args, engine)
    except (ValueError, AssertionError) as error:  # megatron-core asserts what it is given
        if not str(error):
            raise
        end_with(str(error))

    rank = deepspeed.comm.get_rank()
    metrics = MetricsFile(args.metrics if rank == 0 else None, earlier=(state or {}).get("metrics", ()))
    sizes = [engine.grid.topology().get_dim(axis) for axis in ("model", "pipe", "data")]
    layout = "TP {} x PP {} x DP {}".format(*sizes)
    if rank == 0:
        print(f"{layout}, {type(engine).__name__}, {parameter_dtype(args.ds_config)}, step {engine.global_steps}")
    train(args, engine, data, metrics)
    if rank == 0 and args.plot:
        title, token = f"GPT of megatron-core layers, {layout}", "byte" if args.tokenizer == "bytes" else "token"
        print(f"loss curves: {draw_losses(args.plot, {'': metrics.entries}, title, token)}")
    engine.destroy()
    return metrics


def main() -> None:
    args = parse_arguments()
    warnings.filterwarnings("ignore", category=FutureWarning, module="megatron")  # of torch, about its collectives
    try:
        compat.require_megatron("examples/pretrain_gpt_megatron.py")
    except compat.MissingExtraError as error:
        end_with(str(error))
    # so that the kernels of a collective start before those that it overlaps with, as in Megatron-LM's scripts
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    prepare_rank(pin=args.pin)
    deepspeed.init_distributed()
    run(args)
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main()
