"""A stand-in for Megatron-DeepSpeed, written for these tests: the few names that the patch touches, and nothing else.

Its files are laid out so that each hunk of the patch falls where it belongs: the text between two hunks ends on the
line after which the second one inserts, with blank lines above it. So `git apply --unidiff-zero` is really run.
"""

import contextlib
import importlib
import re
import subprocess
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

PATCH = Path(__file__).parents[1] / "patches" / "megatron_deepspeed.patch"
sys.path.append(str(PATCH.parent))  # where users copy `terapipe_patch.py`, the script's own folder is on the path


@dataclass(frozen=True)
class Hunk:
    """Inserted lines, of which the first follows line ``after`` of the unpatched ``file``."""

    file: str
    after: int
    lines: tuple[str, ...]

    @property
    def name(self) -> str:
        """``megatron/utils.py keep_rotary``: the file and the first helper that is named."""
        helper = re.search(r"terapipe_patch\.(\w+)", "".join(self.lines[1:]))
        assert helper is not None
        return f"{self.file} {helper[1]}"


def hunks(patch: str) -> list[Hunk]:
    """Only what such a patch may contain is understood: anything else is an AssertionError."""
    found: list[Hunk] = []
    file, lines = "", patch.splitlines()
    while lines:
        line = lines.pop(0)
        if line.startswith("--- "):
            file = line.removeprefix("--- a/")
            assert lines.pop(0) == f"+++ b/{file}"
            continue
        header = re.fullmatch(r"@@ -(\d+),0 \+(\d+)(?:,(\d+))? @@", line)
        assert header is not None, line
        inserted = [lines.pop(0) for _ in range(int(header[3] or 1))]
        assert all(text.startswith("+") for text in inserted), inserted
        found.append(Hunk(file, int(header[1]), tuple(text[1:] for text in inserted)))
    return found


def as_patch(chosen: list[Hunk]) -> str:
    """The hunks as a patch again, for one that was applied in part."""
    text = ""
    for file in dict.fromkeys(hunk.file for hunk in chosen):
        text += f"--- a/{file}\n+++ b/{file}\n"
        shift = 1
        for hunk in (hunk for hunk in chosen if hunk.file == file):
            text += f"@@ -{hunk.after},0 +{hunk.after + shift},{len(hunk.lines)} @@\n"
            text += "".join(f"+{line}\n" for line in hunk.lines)
            shift += len(hunk.lines)
    return text


# The text of each file before, between and after its hunks.
FILES: dict[str, tuple[str, ...]] = {
    "pretrain_gpt.py": (
        "import torch\nfrom megatron import get_args\n",
        """
def get_batch_pipe(data):
    args = get_args()
    tokens, labels, loss_mask = data["text"][:, :-1], data["text"][:, 1:], data["mask"]
    length = tokens.shape[1]
    position_ids = torch.arange(length).expand_as(tokens)
    attention_mask = torch.ones(length, length).triu(1).bool()
""",
        "    return (tokens, position_ids, attention_mask), (labels.contiguous(), loss_mask)\n",
    ),
    "megatron/training.py": ("", "from deepspeed.compression.compress import init_compression\n"),
    "megatron/utils.py": (
        """
import torch
from megatron import get_args

class RotaryEmbedding:
    def __init__(self, dim, theta):
        self.turns = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    def __call__(self, length):
        angles = torch.outer(torch.arange(length, dtype=torch.float64), self.turns)[:, None, None]
        return [torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()]

def update_rotary_pos_emb(seq_length):
    args = get_args()
    rotary_dim = args.rotary_dim
""",
        "    args.rotary_pos_emb = list(RotaryEmbedding(rotary_dim, theta=args.rope_theta)(seq_length))\n",
    ),
    "megatron/model/transformer.py": (
        """
import contextlib, enum, types
import torch
from torch import nn
from megatron import get_args

tensor_parallel = types.SimpleNamespace(
    get_cuda_rng_tracker=lambda: types.SimpleNamespace(fork=contextlib.nullcontext))
Masks = enum.Enum("Masks", "padding causal")

def turned(x, table):
    half = table[0].shape[-1] // 2
    turns = torch.complex(table[0][: len(x), ..., :half], table[1][: len(x), ..., :half])
    pairs = torch.complex(x[..., :half], x[..., half : 2 * half]) * turns
    return torch.cat((pairs.real, pairs.imag, x[..., 2 * half :]), -1)

class ParallelAttention(nn.Module):
    def __init__(self, hidden, heads, layer_number):
        super().__init__()
        self.heads, self.layer_number, self.attn_mask_type = heads, max(1, layer_number), Masks.causal
        self.query_key_value, self.dense = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)

    def forward(self, hidden_states, attention_mask, rotary_pos_emb=None):
        split = self.query_key_value(hidden_states).chunk(3, -1)
        query_layer, key_layer, value_layer = (x.unflatten(-1, (self.heads, -1)) for x in split)
""",
        """
        if rotary_pos_emb is not None:
            query_layer, key_layer = turned(query_layer, rotary_pos_emb), turned(key_layer, rotary_pos_emb)
        scores = torch.einsum("tbhd,sbhd->bhts", query_layer, key_layer) / query_layer.shape[-1] ** 0.5
        weights = scores.masked_fill(attention_mask, float("-inf")).softmax(-1)
        return self.dense(torch.einsum("bhts,sbhd->tbhd", weights, value_layer).flatten(2))

class Layer(nn.Module):
    def __init__(self, hidden, heads, layer_number):
        super().__init__()
        self.norm, self.self_attention = nn.LayerNorm(hidden), ParallelAttention(hidden, heads, layer_number)

    def forward(self, x):
        args = get_args()
        return x + self.self_attention(self.norm(x), args.attn_mask, getattr(args, "rotary_pos_emb", None))
""",
    ),
    "megatron/model/gpt_model.py": (
        """
import torch
from torch import nn
from deepspeed.pipe import LayerSpec, PipelineModule
from megatron import get_args
from megatron.model.transformer import Layer

class Embedding(nn.Module):
    def __init__(self, vocab, hidden, length):
        super().__init__()
        self.words, self.places = nn.Embedding(vocab, hidden), nn.Embedding(length, hidden)
    def forward(self, inputs):
        return (self.words(inputs[0]) + self.places(inputs[1])).transpose(0, 1).contiguous()

class GPTModelPipe(PipelineModule):
    def __init__(self, num_stages, vocab=31, hidden=16, heads=2, num_layers=4):
        args = get_args()
""",
        """
        layers = [LayerSpec(Embedding, vocab, hidden, args.seq_length)]
        layers += [LayerSpec(Layer, hidden, heads, number) for number in range(num_layers)]
        layers += [LayerSpec(nn.Linear, hidden, vocab)]
        super().__init__(layers=layers, loss_fn=self.loss_func, num_stages=num_stages, partition_method="uniform")

    def loss_func(self, output, labels):
        labels, loss_mask = labels
        losses = nn.functional.cross_entropy(output.flatten(0, 1), labels.t().reshape(-1), reduction="none")
        return (losses * loss_mask.t().reshape(-1)).sum() / loss_mask.sum()
""",
        "    def more(self):\n        return None\n",
    ),
}


def write(root: Path, without: Collection[str] = (), patch: str | None = None) -> None:
    """The stand-in under ``root``, patched by git with all hunks but those named in ``without``."""
    patch = PATCH.read_text(encoding="utf-8") if patch is None else patch
    known = hunks(patch)
    for file, texts in FILES.items():
        lines: list[str] = []
        for hunk, text in zip([h for h in known if h.file == file], texts[:-1], strict=True):
            block = text.strip("\n").splitlines()
            assert len(lines) + len(block) <= hunk.after, f"no room above line {hunk.after} of {file}"
            lines += [""] * (hunk.after - len(lines) - len(block)) + block
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join([*lines, texts[-1].strip("\n"), ""]), encoding="utf-8")
    (root / "megatron/__init__.py").write_text("ARGS = None\ndef get_args():\n    return ARGS\n")
    (root / "megatron/model/__init__.py").touch()
    unknown = set(without) - {hunk.name for hunk in known}
    assert not unknown, unknown
    chosen = as_patch([hunk for hunk in known if hunk.name not in without]) if without else patch
    git = ["git", "-c", "core.autocrlf=false", "apply", "--unidiff-zero", "-"]
    subprocess.run(git, cwd=root, input=chosen, text=True, check=True, capture_output=True, env={"GIT_DIR": "/nowhere"})


def arguments(length: int, **changes: Any) -> SimpleNamespace:
    """What upstream's command line would give."""
    given = {"attention_dropout": 0.0, "rope_theta": 10000.0, "rotary_dim": 6, "deepspeed_config_dict": {}}
    return SimpleNamespace(**{"seq_length": length, **given, **changes})


@contextlib.contextmanager
def imported(root: Path, args: SimpleNamespace) -> Iterator[SimpleNamespace]:
    """The stand-in's modules by their own names while the block runs; ``megatron`` is what it was afterwards."""

    def ours(name: str) -> bool:
        return name.partition(".")[0] in ("megatron", "pretrain_gpt")

    before = {name: sys.modules.pop(name) for name in list(sys.modules) if ours(name)}
    sys.path.insert(0, str(root))
    importlib.invalidate_caches()
    try:
        sys.modules["megatron"] = megatron = importlib.import_module("megatron")
        megatron.ARGS = args  # type: ignore[attr-defined]
        names = ("pretrain_gpt", "megatron.utils", "megatron.model.transformer", "megatron.model.gpt_model")
        yield SimpleNamespace(**{name.rpartition(".")[2]: importlib.import_module(name) for name in names})
    finally:
        sys.path.remove(str(root))
        for name in [name for name in sys.modules if ours(name)]:
            del sys.modules[name]
        sys.modules.update(before)
