"""Train the patched Megatron-DeepSpeed with slices and without, save, and resume from one to the other.

    python -m tests.upstream.megatron_deepspeed SOURCE [--cases NAME ...] [--keep FOLDER]

SOURCE is a git repository of Megatron-DeepSpeed with the commit that `patches/README.md` names. That commit is copied
out, patched, and run as upstream's users would run it. Upstream's tool makes the data from text and a tokenizer that
are generated here, and its `pretrain_gpt.py` trains a small GPT on CPU ranks. Every case trains 9 steps in one go with
slices, and 9 without (the same patched tree without the section). It also trains and saves 6 steps with slices; from
there 3 more follow with slices, and 3 without. All losses, and the parameters at the end, are compared.

Exit codes: 0 all equal, 1 a difference, 2 it cannot be run here.
"""

import argparse
import importlib.util
import itertools
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).parents[2]
PATCH = ROOT / "patches" / "megatron_deepspeed.patch"
NEEDED = ("transformers", "six", "regex", "nltk", "pybind11")
STEPS, SAVED, LENGTH, TIMEOUT_S = 9, 6, 64, 600
LEAST_DIFFERENCE = (
    1e-4  # between the losses of any two steps of a run, relative: a step too many would not be seen else
)
SECTION = {"enabled": True, "schedule": "seq1f1b", "slices": [20, 7, 24, 13], "sequence_dim": 1}
# Adam's epsilon: a bias of keys has a gradient of rounding alone, which Adam would divide by its own size
ARGUMENTS = f"""
    --pipeline-model-parallel-size 2 --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length {LENGTH}
    --max-position-embeddings {LENGTH} --micro-batch-size 1 --global-batch-size 4 --train-iters {STEPS} --lr 1e-2
    --min-lr 1e-3 --lr-decay-style cosine --lr-warmup-iters 2 --weight-decay 0.1 --clip-grad 0.0 --init-method-std 0.1
    --adam-eps 1e-4 --attention-dropout 0.0 --hidden-dropout 0.0 --log-interval 1 --eval-interval 1000 --eval-iters 1
    --split 90,5,5 --num-workers 0 --seed 11 --save-interval 1000 --make-vocab-size-divisible-by 8
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion
    --no-async-tensor-model-parallel-allreduce --distributed-backend gloo --zero-stage 0 --deepspeed
"""


class Failed(Exception):
    """Say what is missing here, or how a program of upstream ended."""


@dataclass(frozen=True)
class Case:
    """Describe one way to train.

    Args:
        limit: the largest relative difference of losses and parameters between a run with slices and one without. Two
            runs with the same slices must agree in every bit.
        step: the relative distance of neighbouring numbers in the dtype of the saved parameters. Rounding may give
            either of them, and twice that is allowed.
    """

    name: str
    limit: float = 2e-6
    tensor: int = 1
    step: float = 0.0
    arguments: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    section: dict[str, Any] = field(default_factory=lambda: SECTION)


BF16 = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}}
CASES = (
    Case("fp32"),
    Case("fp32, 4 equal slices", section={**SECTION, "slices": 4}),
    Case("bf16, ZeRO-1", 2e-3, step=2**-7, arguments=("--bf16", "--zero-stage", "1"), config=BF16),
    Case("fp32, 2 tensor-parallel ranks", tensor=2),
)


# -- what is trained -----------------------------------------------------------------------------------------------


def copy_patched(source: Path, folder: Path) -> None:
    """Copy the commit that `patches/README.md` names, not the work tree of `source`, and apply the patch.

    Upstream imports its vision models with everything else. A wheel of torchvision for CUDA fails to import beside a
    torch for CPUs: a stand-in takes its place where none can be imported.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise Failed(f"upstream needs packages that are not here: {sys.executable} -m pip install {' '.join(missing)}")
    (commit,) = re.findall(r"`deepspeedai/Megatron-DeepSpeed` ([0-9a-f]{40})", (PATCH.parent / "README.md").read_text())
    git = ["git", "-C", str(source), "archive", "--format=tar", commit]
    archive = subprocess.run(git, capture_output=True)
    if archive.returncode:
        wanted = f"no git repository with the commit {commit} of deepspeedai/Megatron-DeepSpeed"
        raise Failed(f"{source} is {wanted}: {archive.stderr.decode().strip()}")
    folder.mkdir()
    subprocess.run(["tar", "-x"], cwd=folder, input=archive.stdout, check=True)
    apply = ["git", "-c", "core.autocrlf=false", "apply", "--unidiff-zero", str(PATCH)]
    subprocess.run(apply, cwd=folder, check=True, env={**os.environ, "GIT_DIR": "/nowhere"})
    shutil.copy(PATCH.with_name("terapipe_patch.py"), folder)
    if subprocess.run([sys.executable, "-c", "import torchvision.datasets"], capture_output=True).returncode:
        shutil.copy(Path(__file__).parent / "stand_ins" / "torchvision.py", folder)


def make_data(upstream: Path, folder: Path) -> list[str]:
    """Make text, a byte-pair tokenizer and upstream's indexed data; return the arguments that name them."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    space = "\u0120"  # how GPT-2's tokenizer writes a space
    merges = [(space, "t"), ("h", "e"), (space + "t", "he")]
    tokens = ["<|endoftext|>", *letters, space, ".", *("".join(pair) for pair in merges)]
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges))
    draw = random.Random(7)
    words = ["the", *("".join(draw.choices(letters, k=draw.randint(2, 7))) for _ in range(40))]
    lines = [{"text": " ".join(draw.choices(words, k=draw.randint(5, 60))) + "."} for _ in range(60)]
    (folder / "text.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = ["--vocab-file", f"{folder}/vocab.json", "--merge-file", f"{folder}/merges.txt"]
    tokenizer = ["--tokenizer-type", "GPT2BPETokenizer", *files]
    output = ["--output-prefix", f"{folder}/data", "--append-eod", "--workers", "1", *tokenizer]
    tool = [str(upstream / "tools/preprocess_data.py"), "--input", f"{folder}/text.jsonl", *output]
    run(tool, folder, "preprocess", upstream)
    return ["--data-path", f"{folder}/data_text_document", *tokenizer]


def run(words: Sequence[str], folder: Path, name: str, upstream: Path) -> None:
    """Run Python with `words`, its output in a file of `folder`; the error has the end of it."""
    environment = {
        **os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PYTHONPATH": os.pathsep.join([str(upstream), str(ROOT), os.environ.get("PYTHONPATH", "")]),
        # upstream's Makefile asks `python3` for pybind11
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }  # fmt: skip
    log, both = folder / f"{name}.log", subprocess.STDOUT
    with log.open("w") as output:
        process = subprocess.Popen([sys.executable, *words], stdout=output, stderr=both, env=environment, cwd=upstream)
        try:
            code = process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its ranks then
            code = process.wait()
    if code:
        said, _, _ = log.read_text(errors="replace").partition("torch/distributed/elastic/multiprocessing/api.py")
        raise Failed("\n".join([f"{name} ended with {code}:", *said.splitlines()[-40:]]))


# -- runs ----------------------------------------------------------------------------------------------------------


class Trained(NamedTuple):
    """Hold a run: the engine that trained, the loss of each step, and the last parameters by file and name."""

    engine: str
    losses: dict[int, float]
    parameters: dict[str, torch.Tensor]


def train(case: Case, upstream: Path, folder: Path, data: Sequence[str], sliced: bool, *more: str) -> Trained:
    """Run `pretrain_gpt.py` once, which saves in the new `folder` at its end."""
    folder.mkdir(parents=True)
    config = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 1, "steps_per_print": 100}
    # clipping is 1.0 unless set, and DeepSpeed's own fp32 norm leaves out later stages
    config |= {"gradient_clipping": 0.0, **case.config, **({"terapipe": case.section} if sliced else {})}
    (folder / "config.json").write_text(json.dumps(config))
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(2 * case.tensor)]
    losses, rank = folder / "losses.json", Path(__file__).with_name("megatron_deepspeed_rank.py")
    program = [str(rank), str(losses), str(upstream / "pretrain_gpt.py")]
    tensor = ["--tensor-model-parallel-size", str(case.tensor)]
    files = ["--deepspeed_config", f"{folder}/config.json", "--save", f"{folder}/saved"]
    arguments = [*data, *ARGUMENTS.split(), *tensor, *files, *case.arguments, *more]
    run([*launch, *program, *arguments], folder.parent, folder.name, upstream)
    told = json.loads(losses.read_text())
    parameters = {
        f"{path.name}/{name}": value.double()
        for path in sorted(folder.glob("saved/global_step*/layer_*.pt"))
        for name, value in torch.load(path, map_location="cpu", weights_only=False).items()
        if torch.is_tensor(value)
    }
    return Trained(told["engine"], {int(step): loss for step, loss in told["losses"].items()}, parameters)


def compare(what: str, run: Trained, reference: Trained, limit: float, step: float = 0.0, ended: bool = True) -> bool:
    """Compare `run` with the same steps of `reference`, with `ended` the last parameters too; say how far they are."""
    losses = [abs(loss / reference.losses.get(step, math.nan) - 1) for step, loss in run.losses.items()]
    parameters = [0.0]
    if ended:
        assert run.parameters.keys() == reference.parameters.keys(), (what, list(run.parameters)[:3])
        largest = max(float(value.abs().max()) for value in reference.parameters.values())
        parameters = [float((run.parameters[n] - v).abs().max()) / largest for n, v in reference.parameters.items()]
    most = max(limit, 2 * step)
    holds = all(each <= limit for each in losses) and all(each <= most for each in parameters)  # no number holds not
    verdict = f"allowed {limit:.0e} and {most:.0e}   {'equal' if holds else 'DIFFERENT'}"
    print(f"  {what:<44} losses {max(losses):.1e}   parameters {max(parameters):.1e}   {verdict}", flush=True)
    return holds


def check(case: Case, upstream: Path, folder: Path, data: Sequence[str]) -> bool:
    """Make all runs of a case, print their differences, and return whether all are within the limits."""

    def runs(name: str, sliced: bool, *more: str) -> Trained:
        return train(case, upstream, folder / name, data, sliced, *more)

    load = "--load", f"{folder}/saved/saved"
    everyone = {
        "stock": (stock := runs("stock", False)),
        "sliced": (sliced := runs("sliced", True)),
        "saved at 6": (saved := runs("saved", True, "--exit-interval", str(SAVED))),
        "sliced from 6": (with_slices := runs("saved-sliced", True, *load)),
        "stock from 6": (without := runs("saved-stock", False, *load)),
    }
    print(f"{case.name}: slices {case.section['slices']}, {2 * case.tensor} ranks")
    for name, run in everyone.items():
        steps = " ".join(f"{run.losses[step]:.7f}" if step in run.losses else " " * 9 for step in range(1, STEPS + 1))
        print(f"  {name:<14} {run.engine:<15} {steps}")
    equal = [
        compare("9 steps with slices / 9 of stock", sliced, stock, case.limit, case.step),
        compare("the first 6 / those of 9, with slices", saved, sliced, 0.0, ended=False),
        compare("resumed with slices / 9 steps with slices", with_slices, sliced, 0.0),
        compare("resumed with stock / 9 steps of stock", without, stock, case.limit, case.step),
    ]
    return all(equal) & means_something(everyone)


def means_something(runs: dict[str, Trained]) -> bool:
    """Return whether each run is of the expected engine and steps, and no two steps have about the same loss."""
    wrong = False
    for name, run in runs.items():
        engine = "PipelineEngine" if name.startswith("stock") else "TeraPipeEngine"
        first, last = SAVED + 1 if "from" in name else 1, SAVED if "at" in name else STEPS
        if (run.engine, sorted(run.losses)) != (engine, list(range(first, last + 1))):
            print(f"  {name}: {run.engine} took the steps {sorted(run.losses)}: WRONG")
            wrong = True
    losses = sorted(runs["stock"].losses.values())
    alike = [low for low, high in itertools.pairwise(losses) if high - low < LEAST_DIFFERENCE * high]
    if alike:
        print(f"  two steps have about the same loss, {alike[0]}: the comparison would not see a step too many")
    return not wrong and not alike


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("source", type=Path, help="a git repository of Megatron-DeepSpeed")
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in CASES], help="these only")
    parser.add_argument("--keep", type=Path, help="keep everything in this new folder, logs of all runs included")
    options = parser.parse_args()
    chosen = [case for case in CASES if options.cases is None or case.name in options.cases]
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.keep or Path(temporary)).resolve()
        try:
            folder.mkdir(parents=True, exist_ok=options.keep is None)
            upstream = folder / "upstream"
            copy_patched(options.source, upstream)
            data = make_data(upstream, folder)
        except (Failed, OSError) as error:
            print(error, file=sys.stderr)
            return 2
        equal = []
        for number, case in enumerate(chosen):
            try:
                equal.append(check(case, upstream, folder / f"case{number}", data))
            except Failed as error:
                print(f"{case.name}: {error}", flush=True)
                equal.append(False)
    return 0 if all(equal) else 1


if __name__ == "__main__":
    sys.exit(main())
