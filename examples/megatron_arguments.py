"""The command line of pretrain_gpt_megatron.py: Megatron-LM's names where it has them.

What DeepSpeed decides (batch sizes, precision, optimizer, ZeRO, clipping) is in its JSON file and nowhere else.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

from command_line import Parser

from terapipe_ds.config import TeraPipeConfig
from terapipe_ds.config.megatron_arguments import translation

EXAMPLES = """\
examples:
  four GPUs, or four processes on a CPU (then with DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 in front):
    deepspeed --num_gpus 4 examples/pretrain_gpt_megatron.py --tensor-parallel 2 --pipeline-parallel 2 \\
        --deepspeed_config configs/gpt_tp2_pp2.json
  data of your own:
    python examples/index_text.py books/ --out books
    deepspeed ... --data-path books --save checkpoints --save-interval 500
  and on from there:
    deepspeed ... --data-path books --save checkpoints --load checkpoints
  a Llama-like model:
    deepspeed ... --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear \\
        --untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2
"""

POSITION_IDS = 1  # among the inputs (tokens, position_ids)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, with ``deepspeed_config`` read: a dict in ``ds_config``."""
    parser = build_parser()
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        parser.error(_about_unknown(unknown))
    try:
        args.ds_config = json.loads(Path(args.deepspeed_config).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        parser.error(f"--deepspeed_config {args.deepspeed_config} cannot be read: {error}")
    try:
        section = TeraPipeConfig.from_deepspeed(args.ds_config)
        if section.enabled and section.slices != "auto":
            section.plan_for(args.seq_length)
    except ValueError as error:
        parser.error(str(error))
    per_replica = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    ranks = int(os.environ.get("WORLD_SIZE", per_replica))  # the launcher sets it
    if ranks % per_replica:
        parser.error(
            f"{ranks} ranks do not divide by --tensor-parallel {args.tensor_model_parallel_size} x --pipeline-parallel "
            f"{args.pipeline_model_parallel_size} = {per_replica}"
        )
    if args.data_path is None and args.tokenizer != "bytes":
        parser.error(f"--tokenizer {args.tokenizer} needs --data-path: without one the data are bytes")
    if args.reset_attention_mask:
        _keep_to_documents(parser, args, section)
    if args.num_query_groups is not None and not args.group_query_attention:
        parser.error("--num-query-groups needs --group-query-attention")
    if args.sequence_parallel and args.seq_length % args.tensor_model_parallel_size:
        parser.error(
            f"--sequence-parallel splits tokens over tensor-parallel ranks: --seq-length {args.seq_length} does not "
            f"divide by {args.tensor_model_parallel_size}"
        )
    args.max_position_embeddings = args.max_position_embeddings or args.seq_length
    if args.max_position_embeddings < args.seq_length:
        parser.error(
            f"--max-position-embeddings {args.max_position_embeddings} is less than --seq-length {args.seq_length}"
        )
    return args


def _keep_to_documents(parser: argparse.ArgumentParser, args: argparse.Namespace, section: TeraPipeConfig) -> None:
    """Have the engine find the documents of packed rows in the position ids, which are the second input."""
    if not args.reset_position_ids:
        parser.error("--reset-attention-mask needs --reset-position-ids: documents are found by positions that restart")
    if not section.enabled:
        parser.error(
            "--reset-attention-mask needs an enabled terapipe section: DeepSpeed's own engine would mix the documents"
        )
    if section.documents not in ("off", POSITION_IDS):
        parser.error(
            f"--reset-attention-mask sets terapipe.documents to {POSITION_IDS}, and the file of --deepspeed_config has "
            f"{section.documents!r}: leave it out there"
        )
    args.ds_config["terapipe"]["documents"] = POSITION_IDS


def _about_unknown(unknown: Sequence[str]) -> str:
    """All unknown arguments, each with its place in the DeepSpeed JSON, as far as it has one."""
    names = [word.partition("=")[0] for word in unknown if word.startswith("--")]
    return "; ".join(f"{name}: {translation(name)}" for name in names) or f"unknown arguments: {' '.join(unknown)}"


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        description="Train a GPT of megatron-core layers on text, over TP x PP x DP, in token slices.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--deepspeed_config",
        required=True,
        metavar="FILE.json",
        help="batch sizes, precision, optimizer, ZeRO, clipping, and the section `terapipe`",
    )
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)  # the launcher gives it
    parser.add_argument("--seed", type=int, default=1234, help="of weights, samples and dropout")
    parser.add_argument("--pin", action=argparse.BooleanOptionalAction, default=True, help="CPU ranks to cores")
    _add_parallel(parser.add_argument_group("parallelism", "replicas (DP) are what is left of the ranks"))
    _add_model(parser.add_argument_group("model"))
    _add_recompute(parser.add_argument_group("recomputation of activations"))
    _add_data(parser.add_argument_group("data"))
    _add_run(parser.add_argument_group("run"))
    return parser


def _add_parallel(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--tensor-model-parallel-size", "--tensor-parallel", type=_positive, default=1, metavar="N")
    add("--pipeline-model-parallel-size", "--pipeline-parallel", type=_positive, default=1, metavar="N")
    add("--sequence-parallel", action="store_true", help="norms and dropout split over the tensor-parallel ranks")


def _add_model(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--num-layers", type=_positive, default=4, metavar="N", help="default: 4")
    add("--hidden-size", type=_positive, default=128, metavar="N", help="default: 128")
    add("--ffn-hidden-size", type=_positive, metavar="N", help="default: 4 * hidden size, with --swiglu 2/3 of it")
    add("--num-attention-heads", type=_positive, default=4, metavar="N", help="default: 4")
    add("--group-query-attention", action="store_true")
    add("--num-query-groups", type=_positive, metavar="N", help="with --group-query-attention; default: 1")
    add("--kv-channels", type=_positive, metavar="N", help="size of a head; default: hidden size / heads")
    add("--seq-length", type=_positive, default=512, metavar="N", help="tokens of a sample; default: 512")
    add("--max-position-embeddings", type=_positive, metavar="N", help="of learned positions; default: --seq-length")
    add("--position-embedding-type", choices=("learned_absolute", "rope", "none"), default="learned_absolute")
    add("--rotary-base", type=int, default=10000, metavar="N")
    add("--rotary-percent", type=float, default=1.0, metavar="X")
    add("--normalization", choices=("LayerNorm", "RMSNorm"), default="LayerNorm")
    add("--norm-epsilon", type=float, default=1e-5, metavar="X")
    add("--swiglu", action="store_true")
    add("--disable-bias-linear", action="store_true")
    add("--qk-layernorm", action="store_true")
    add("--untie-embeddings-and-output-weights", action="store_true")
    divisible = "pad the vocabulary to a multiple of N * tensor-parallel size; default: 128"
    add("--make-vocab-size-divisible-by", type=_positive, default=128, metavar="N", help=divisible)
    add("--init-method-std", type=float, default=0.02, metavar="X")
    add("--use-cpu-initialization", action="store_true", help="weights that do not depend on the tensor-parallel size")
    add("--hidden-dropout", type=float, default=0.0, metavar="P", help="default: 0")
    add("--attention-dropout", type=float, default=0.0, metavar="P", help="default: 0")
    engine = "transformer_engine falls back to local where it is not installed, and on a CPU"
    add("--transformer-impl", choices=("local", "transformer_engine"), default="transformer_engine", help=engine)


def _add_recompute(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--recompute-granularity", choices=("full", "selective"))
    add("--recompute-method", choices=("uniform", "block"), help="of full recomputation")
    add("--recompute-num-layers", type=_positive, metavar="N", help="of full recomputation")
    add("--recompute-modules", nargs="+", metavar="NAME", help="of selective recomputation; default: core_attn")


def _add_data(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    prefixes = "of .bin and .idx files, or weights and prefixes in turns; default: the source of Python's library"
    add("--data-path", nargs="+", metavar="PREFIX", help=prefixes)
    cache = "of the order of samples, on a file system that all nodes share; default: beside the data"
    add("--data-cache-path", metavar="DIR", help=cache)
    tokenizer = "that of the files, named as for index_text.py; default: bytes"
    add("--tokenizer", default="bytes", metavar="NAME", help=tokenizer)
    shares = "shares of training, validation and test documents; default: 949,50,1"
    add("--split", type=_split, default="949,50,1", help=shares)
    add("--reset-position-ids", action="store_true", help="learned positions start anew in each document")
    add("--reset-attention-mask", action="store_true", help="attention keeps to documents; with --reset-position-ids")
    add("--eod-mask-loss", action="store_true", help="no loss where a document has ended")
    add("--num-workers", type=_not_negative, default=0, metavar="N", help="processes that read ahead; default: 0")


def _add_run(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--train-iters", type=_positive, default=150, metavar="N", help="steps, loaded ones included; default: 150")
    add("--eval-interval", type=_positive, default=20, metavar="N", help="steps between evaluations; default: 20")
    add("--eval-iters", type=_not_negative, default=4, metavar="N", help="batches of each; 0: none; default: 4")
    add("--save", metavar="DIR", help="where checkpoints go, at the end and at every --save-interval")
    add("--save-interval", type=_positive, metavar="N", help="steps between checkpoints")
    add("--load", metavar="DIR", help="go on from the newest checkpoint there; a new run where there is none")
    add("--finetune", action="store_true", help="with --load: its parameters alone, from step 0")
    add("--metrics", metavar="FILE.jsonl", help="one line per step: loss and seconds")
    add("--plot", default="out/pretrain_megatron_loss.png", metavar="FILE.png", help="loss curves, drawn at the end")


def _split(text: str) -> str:
    shares = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch(r"\d+(\.\d*)?|\.\d+", share) for share in shares) or not any(map(float, shares)):
        raise argparse.ArgumentTypeError(f"{text!r}: give shares of training, validation and test, as in 949,50,1")
    return text


def _positive(text: str) -> int:
    return _at_least(1, text)


def _not_negative(text: str) -> int:
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text} is not a number >= {least}")
    return int(text)
