"""Run `terapipe convert`: write the DeepSpeed JSON of another program's command line."""

from __future__ import annotations

import json
import sys

from terapipe_ds.commands.options import Options, Output, Text, option
from terapipe_ds.files.atomic import write_text

HELP = "write the DeepSpeed JSON of a Megatron-LM command line"
DESCRIPTION = (
    "Translate Megatron-LM's arguments into a DeepSpeed JSON with a terapipe section, on stdout or in a file. stderr "
    "lists the arguments that stay with the training script, and those without a counterpart, with the reason."
)
EXAMPLES = """\
  terapipe convert --megatron-args "--micro-batch-size 1 --lr 3e-4 --train-iters 1000"
  terapipe convert --megatron-args "$(cat arguments.txt)" --out ds.json
"""


class ConvertOptions(Options):
    megatron_args: Text = option("the arguments as one word: in quotes", '"ARGUMENTS"', required=True)
    out: Output | None = option("write the JSON here", "FILE")


def run(options: ConvertOptions) -> None:
    from terapipe_ds.config.megatron_arguments import convert

    result = convert(options.megatron_args)
    text = json.dumps(result.ds_config, indent=2) + "\n"
    if options.out:
        write_text(options.out, text)
    else:
        print(text, end="")
    lines = [f"stay with the script: {' '.join(result.kept)}"] if result.kept else []
    lines += [f"{name}: {reason}" for name, reason in result.lost.items()]
    print("\n".join(lines), end="\n" if lines else "", file=sys.stderr)
