"""Windows of attention in a config.json, against the models' own classes in transformers and against counted pairs."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from terapipe_ds.cli import main
from terapipe_ds.costs.analytic import analytic_costs
from terapipe_ds.costs.devices import DeviceCard, LinkCard, device_card
from terapipe_ds.costs.model_sizes import ModelSize, ModelSizeError, model_size
from terapipe_ds.planner.cluster import Cluster
from terapipe_ds.planner.errors import PlannerError
from terapipe_ds.planner.layers.config_json import size_of_config
from terapipe_ds.planner.layers.counted import CountedLayers
from terapipe_ds.planner.layers.parts import Setting
from terapipe_ds.planner.memory import MemoryModel

transformers = pytest.importorskip("transformers")

LENGTH, LAYERS, WINDOW = 12, 7, 5
NARROW = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS, "head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": WINDOW, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
PLAIN = (
    "mistral", "ministral", "phi3", "starcoder2", "gemma2", "gemma3_text", "cohere2", "olmo3", "exaone4", "llama",
    "qwen2", "smollm3",
)  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    **{family: {} for family in PLAIN},
    "qwen3": {"use_sliding_window": True, "max_window_layers": 3},
    "qwen3_moe": {"use_sliding_window": True, "num_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
# One FLOP a second, and everything but arithmetic for nothing: its seconds are FLOPs.
ANY = LinkCard(1e40, 1e-40)
COUNTER = DeviceCard("counter", "a counter", {"fp32": 1.0}, 1e40, 10**6, 1e-40, 1.0, 1.0, 1.0, 4, ANY, ANY)


def seen_by_layers(model: Any) -> list[int]:
    """Return how many tokens the last token of each decoder layer depends on; 0 for all of them."""
    seen: list[int] = []

    def before(layer: Any, args: Any) -> Any:
        layer.received = args[0].detach().requires_grad_()
        return layer.received, *args[1:]

    def after(layer: Any, args: Any, output: Any) -> None:
        last = (output[0] if isinstance(output, tuple) else output)[0, -1]
        (gradient,) = torch.autograd.grad(last.square().sum(), layer.received, retain_graph=True)
        count = int((gradient[0].abs().sum(-1) > 0).sum())
        seen.append(0 if count == LENGTH else count)

    for layer in model.model.layers:
        layer.register_forward_pre_hook(before)
        layer.register_forward_hook(after)
    model(torch.randint(64, (1, LENGTH), generator=torch.Generator().manual_seed(1)), use_cache=False)
    return seen


@pytest.mark.parametrize("lists_kinds", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_windows_of_the_class(family: str, lists_kinds: bool, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    transformers.CONFIG_MAPPING[family](**NARROW | FAMILIES[family]).save_pretrained(tmp_path)
    if not lists_kinds:  # as configs of transformers before 4.53, which may leave out defaults too
        own = FAMILIES[family].keys() | NARROW.keys() | {"model_type"}
        path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key in own}))
    torch.manual_seed(1)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    assert list(size_of_config(str(path)).windows or (0,) * LAYERS) == seen_by_layers(model)


def test_windows_of_layers_that_differ_and_refusals(tmp_path: Path) -> None:
    path, kinds = tmp_path / "config.json", ["sliding_attention", "full_attention", "chunked_attention"]
    of_four = NARROW | {"model_type": "llama", "num_hidden_layers": 3, "layer_types": kinds}
    path.write_text(json.dumps(of_four | {"per_layer_config": {"0": {"sliding_window": 3}}}))
    assert size_of_config(str(path)).windows == (3, 0, 0)
    own = {"0": {"sliding_window": None}, "2": {"sliding_window": 4}}
    path.write_text(json.dumps(NARROW | {"model_type": "mistral", "num_hidden_layers": 3, "per_layer_config": own}))
    assert size_of_config(str(path)).windows == (0, WINDOW, 4)
    deep = NARROW | {"model_type": "qwen2", "num_hidden_layers": 30, "use_sliding_window": True}
    path.write_text(json.dumps(deep))
    kinds_of_class = transformers.AutoConfig.from_pretrained(tmp_path).layer_types
    assert size_of_config(str(path)).windows == tuple(WINDOW * (kind != "full_attention") for kind in kinds_of_class)
    for change, message in (
        ({"layer_types": kinds[:2]}, "layer_types has 2 entries for 3 layers"),
        ({"sliding_window": "4096"}, "sliding_window = '4096': give an integer"),
    ):
        path.write_text(json.dumps(of_four | change))
        with pytest.raises(PlannerError, match=message):
            size_of_config(str(path))
    with pytest.raises(ModelSizeError, match="3 windows, 32 layers; give one per layer"):
        dataclasses.replace(model_size("llama-3-8b"), windows=(1, 2, 3))


def test_flops_of_pairs_within_windows() -> None:
    """Slices and whole sequences count each pair of a query and a key that their layer's window allows once."""
    windows = (5, 0, 1, 5, 40)
    size = ModelSize("windows", 5, 4, 2, 1, 2, 8, 10, 64, windows=windows)
    plain, length, lengths = dataclasses.replace(size, windows=()), 24, (7, 1, 10, 6)

    def counted(model: ModelSize, stages: int) -> float:
        parts = analytic_costs(model, COUNTER, num_stages=stages)
        spans = [(n, sum(lengths[:place])) for place, n in enumerate(lengths)]
        return sum(part.forward_s(*span) + part.backward_s(*span) for part in parts for span in spans)

    of_pair = 4 * size.num_heads * size.head_dim
    lost = sum(max(0, t + 1 - (window or length)) for window in windows for t in range(length))
    assert plain.training_flops(length) - size.training_flops(length) == 3 * of_pair * lost
    for stages in (1, 2, 5):
        assert counted(plain, stages) - counted(size, stages) == pytest.approx(3.5 * of_pair * lost, rel=1e-9)
    # the parts of a strategy are sums over layers
    layers = CountedLayers(size, Cluster(COUNTER, 1, 1), "fp32").layer_costs(Setting(1, 1), 0)
    of_parts = [part.forward_s(10, 8) for part in analytic_costs(size, COUNTER, num_stages=5)]
    assert [cost.forward_s(10, 8) for cost in layers[2:-2]] == pytest.approx(of_parts[1:-1], rel=1e-12)
    assert layers[2].forward_s(10, 8) > layers[1].forward_s(10, 8) > layers[3].forward_s(10, 8)


def test_a_window_takes_less_time_and_its_gradients_less_memory() -> None:
    size = dataclasses.replace(model_size("llama-3-8b"), windows=(1024, 0) * 16)
    plain, length = model_size("llama-3-8b"), 131072
    ours, theirs = (
        analytic_costs(one, "h100", num_stages=4)[1].forward_s(4096, length - 4096) for one in (size, plain)
    )
    assert ours < 0.7 * theirs
    layers = CountedLayers(size, Cluster(device_card("h100"), 1, 8))
    assert [one.windows for one in layers.layer_costs(Setting(1, 1, zero_stage=1), 0)] == [
        (), *[((1024, 1),), ()] * 16, (),
    ]  # fmt: skip
    setting: dict[str, Any] = {"num_stages": 4, "dtype": "bfloat16", "micro_batch": 1, "zero_stage": 1}
    ours_memory, theirs_memory = (MemoryModel.of_model(one, **setting) for one in (size, plain))
    assert ours_memory.store_bytes(1, length) == theirs_memory.store_bytes(1, length)
    # dK and dV in fp32 of half of the layers last while a slice reaches them
    dropped = 4 * 2 * 8 * 128 * 4 * (length - 1023 - 4096)
    grads = [memory.store_grad_bytes(1, length, 4096) for memory in (theirs_memory, ours_memory)]
    assert grads[0] - grads[1] == dropped


def test_commands_name_the_windows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(NARROW | {"model_type": "gemma3_text"}))
    question = ["--model", str(tmp_path), "--device", "h100", "--sequence-length", "64"]
    assert main(["plan", *question, "--stages", "2", "--schedule", "seq1f1b"]) == 0
    assert "windows: 6 of 7 layers see 5 tokens at most" in capsys.readouterr().out
    assert main(["strategy", *question, "--devices", "2", "--global-batch", "2", "--schedule", "seq1f1b"]) == 0
    assert "  windows     6 of 7 layers see 5 tokens at most" in capsys.readouterr().out
