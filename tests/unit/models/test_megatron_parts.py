"""The small parts of the Megatron layers: norms, gradients, names, specs, marks; each without process groups."""

import functools
import re
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from deepspeed.runtime.pipe.topology import ProcessTopology
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import MLATransformerConfig, ModuleSpec, TransformerConfig
from megatron.core.transformer.attention import CrossAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.utils import GlobalMemoryBuffer
from torch import nn

from terapipe_ds import compat
from terapipe_ds.attention import ActiveSlice, push_slice
from terapipe_ds.losses import Head
from terapipe_ds.models.megatron import MegatronConfigError, VocabParallelLoss, groups, kernels
from terapipe_ds.models.megatron.attention import SlicedCoreAttention, layer_specs
from terapipe_ds.models.megatron.kernels import TorchNorm
from terapipe_ds.models.megatron.layers import Blueprint
from terapipe_ds.models.megatron.weights import _patterns, is_partial, mark_split_parameters, universal_checkpoint_info
from terapipe_ds.models.rank_gradients import gradient_reader, is_split
from terapipe_ds.runtime.checkpoints.engine_methods import MODEL_SIZES

SIZES: dict[str, Any] = {"num_layers": 4, "hidden_size": 16, "num_attention_heads": 4}
ON_CPU: dict[str, Any] = {"use_cpu_initialization": True, "params_dtype": torch.float64}


def config(**changes: Any) -> TransformerConfig:
    return TransformerConfig(**{**SIZES, **ON_CPU, **changes})


# -- norms ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_norms_are_torch_s(kind: str) -> None:
    ours = TorchNorm(config(normalization=kind), 16, eps=1e-3)
    theirs = getattr(nn, kind)(16, eps=1e-3, dtype=torch.float64)
    assert dict(ours.named_parameters()).keys() == dict(theirs.named_parameters()).keys()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            mine.copy_(torch.randn(16, generator=generator))
            other.copy_(mine)
    hidden = torch.randn(5, 2, 16, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(ours(hidden), theirs(hidden), rtol=0, atol=0)


def test_zero_centred_weights_start_at_zero_and_scale_by_one() -> None:
    norm = TorchNorm(config(layernorm_zero_centered_gamma=True), 16)
    hidden = torch.randn(3, 16, dtype=torch.float64)
    assert norm.weight.abs().max() == 0
    torch.testing.assert_close(norm(hidden), nn.functional.layer_norm(hidden, (16,)))
    with torch.no_grad():
        norm.weight.fill_(1.0)
    torch.testing.assert_close(norm(hidden), 2 * nn.functional.layer_norm(hidden, (16,)))


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_half_precision_keeps_a_small_gamma(kind: str) -> None:
    """1 + gamma is 1 in bf16 for gamma = 0.001; Transformer Engine adds in fp32."""
    half = {"params_dtype": torch.bfloat16, "layernorm_zero_centered_gamma": True}
    norm = TorchNorm(config(normalization=kind, **half), 16)
    exact = TorchNorm(config(normalization=kind, layernorm_zero_centered_gamma=True), 16)
    with torch.no_grad():
        norm.weight.fill_(0.001)
        exact.weight.copy_(norm.weight)
        x = 100 * torch.randn(64, 16, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
        assert torch.equal(norm(x), exact(x.double()).to(torch.bfloat16))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_norm_parameters_say_whether_their_gradients_are_partial(sequence_parallel: bool) -> None:
    shape = config(tensor_model_parallel_size=2, sequence_parallel=sequence_parallel)
    norm = TorchNorm(shape, 16)
    partial = {name for name, p in norm.named_parameters() if is_partial(name, p, shape)}
    assert partial == ({"weight", "bias"} if sequence_parallel else set())


# -- partial gradients ---------------------------------------------------------------------------------------


def test_an_optimizer_whose_gradients_are_somewhere_else_is_refused() -> None:
    with pytest.raises(TypeError, match="ZeRO stage 0 or 1"):
        gradient_reader(object.__new__(DeepSpeedZeroOptimizer_Stage3))


def test_what_another_engine_left_on_a_parameter_is_not_read() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    parameter._hp_grad, parameter.grad_accum = torch.ones(3), torch.ones(3)  # type: ignore[attr-defined]
    read = gradient_reader(torch.optim.SGD([parameter], lr=1.0))
    assert read(parameter) is None
    parameter.grad = torch.full((3,), 2.0)
    assert read(parameter) is parameter.grad


def test_patterns_match_every_layer_and_nothing_else() -> None:
    names = [f"{layer}.layer.mlp.linear_fc1.weight" for layer in (1, 2, 13)]
    (pattern,) = _patterns(names)
    assert all(re.match(pattern, name) for name in [*names, "99.layer.mlp.linear_fc1.weight"])
    for other in ("layer.mlp.linear_fc1.weight2", "layer.mlp.linear_fc2.weight", "layerxmlp.linear_fc1.weight"):
        assert not re.match(pattern, f"1.{other}"), other


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_says_how_the_whole_is_made_of_parts(ranks: int) -> None:
    """Under DeepSpeed's names, and with the sizes where the engine looks for them."""
    dims = {
        "tied_modules.embedding.word_embeddings.weight": 0, "1.layer.mlp.linear_fc1.weight": 0,
        "1.layer.mlp.linear_fc2.weight": 1, "1.layer.input_layernorm.weight": None, "2.layer.mlp.experts.weight1": 1,
    }  # fmt: skip
    parameters = {name: nn.Parameter(torch.zeros(1)) for name in (*dims, "frozen")}
    for name, dim in dims.items():
        if dim is not None:
            set_tensor_model_parallel_attributes(parameters[name], True, dim, 1)
    parameters["frozen"].requires_grad_(False)
    fields = {**SIZES, **ON_CPU, "gated_linear_unit": True, "kv_lora_rank": 7, "softmax_type": "learnable"}
    module: Any = SimpleNamespace(named_parameters=parameters.items)
    grid: Any = SimpleNamespace(get_pipe_parallel_world_size=lambda: 1, get_slice_parallel_world_size=lambda: ranks)
    info = universal_checkpoint_info(module, Blueprint(MLATransformerConfig(**fields), 8, 4), grid)
    assert info["vocabulary_parameter_patterns"] == [r"tied_modules\.embedding\.word_embeddings\.weight$"]
    assert info["pipeline_replicated_parameter_patterns"] == info["vocabulary_parameter_patterns"]
    assert info["parameter_with_2_sub_params_cat_dim_0"] == [r"\d+\.layer\.mlp\.linear_fc1\.weight$"]
    grouped = r"\d+\.layer\.mlp\.experts\.weight1$"
    assert info["parameter_with_row_parallelism_patterns"] == [grouped, r"\d+\.layer\.mlp\.linear_fc2\.weight$"]
    assert info["parameter_to_average_patterns"] == [r"\d+\.layer\.input_layernorm\.weight$"]
    assert list(info.get("autotp_unsupported_parameter_patterns", ())) == [grouped] * (ranks - 1)
    assert {"kv_lora_rank": 7, "softmax_type": "learnable"}.items() <= info[MODEL_SIZES].items()


def test_weights_that_nobody_draws_are_marked() -> None:
    """megatron-core marks them as it draws them."""
    options: dict[str, Any] = {"config": config(perform_initialization=False), "init_method": nn.init.zeros_}
    options |= {"bias": False, "skip_bias_add": False, "tp_group": SimpleNamespace(size=lambda: 2, rank=lambda: 0)}
    layers = nn.ModuleList(
        [
            ColumnParallelLinear(4, 4, gather_output=False, **options),
            RowParallelLinear(4, 4, input_is_parallel=True, **options),
        ]
    )
    assert not any(is_split(weight) for weight in layers.parameters())
    mark_split_parameters(layers)
    assert [(is_split(weight), weight.partition_dim) for weight in layers.parameters()] == [(True, 0), (True, 1)]


@pytest.mark.parametrize(("name", "changes", "is_marked", "expected"), [
    ("1.layer.self_attention.q_layernorm.weight", {}, False, True),
    ("1.layer.self_attention.k_layernorm.weight", {}, False, True),
    ("1.layer.self_attention.q_layernorm.weight", {"multi_latent_attention": True}, False, False),
    ("1.layer.seq_layernorm.weight", {}, False, False),
    ("1.layer.mlp.router.weight", {"sequence_parallel": True}, True, True),
    ("position_embeddings.weight", {"sequence_parallel": True}, False, False),
    ("1.layer.mlp.router.weight", {}, True, False),
])  # fmt: skip
def test_gradients_that_ranks_sum(name: str, changes: dict[str, Any], is_marked: bool, expected: bool) -> None:
    """Of queries' and keys' norms, before latent attention cuts the heads, and of a rank's own tokens."""
    parameter: Any = nn.Parameter(torch.zeros(1))
    parameter.sequence_parallel = is_marked
    of_ranks: Any = SimpleNamespace(**{"sequence_parallel": False, "multi_latent_attention": False, **changes})
    assert is_partial(name, parameter, of_ranks) == expected
    parameter.tensor_model_parallel = True
    assert not is_partial(name, parameter, of_ranks)


# -- groups and the output projection -------------------------------------------------------------------------


@pytest.mark.parametrize(("dims", "changes", "problem"), [
    ({"pipe": 2, "data": 2}, {}, None),
    ({"data": 2, "pipe": 2, "model": 1}, {}, None),
    ({"pipe": 2, "data": 1, "model": 2}, {"tensor_model_parallel_size": 2}, None),
    ({"model": 2, "pipe": 2}, {"tensor_model_parallel_size": 2}, "puts its ranks in another order"),
    ({"pipe": 2, "data": 1, "sequence": 2}, {}, "leave the axis sequence out"),
    ({"pipe": 2, "model": 2}, {}, "tensor_model_parallel_size=1, but the topology has 2 tensor-parallel ranks"),
    ({"pipe": 2}, {"pipeline_model_parallel_size": 4, "pipeline_dtype": torch.float64}, "has 2 stages; give the same"),
])  # fmt: skip
def test_layouts_that_megatron_cannot_have(dims: dict[str, int], changes: dict[str, Any], problem: str | None) -> None:
    topology = ProcessTopology(list(dims), list(dims.values()))
    grid: Any = SimpleNamespace(topology=lambda: topology)
    grid.get_slice_parallel_world_size = lambda: dims.get("model", 1)
    grid.get_pipe_parallel_world_size = lambda: dims["pipe"]
    told = groups._problem(grid, config(**changes))
    assert told is None if problem is None else problem in str(told)


def test_an_output_projection_that_a_program_changes_keeps_its_logits() -> None:
    """A loss by the weight alone would pass by what a hook or another product does to them."""
    blueprint = Blueprint(config(), vocab_size=8, max_sequence_length=4)
    blueprint.groups = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1))  # type: ignore[assignment]
    weight = torch.zeros(8, 16)

    def described(change: Callable[[Any], Any]) -> Any:
        projection = object.__new__(ColumnParallelLinear)
        nn.Module.__init__(projection)
        change(projection)
        return blueprint.head_of(projection, weight)

    assert vars(described(lambda _: None)) == vars(Head(weight))  # Python 3.13 compares equal tensors
    assert "has hooks" in described(lambda projection: projection.register_forward_hook(print))
    assert "has hooks" in described(lambda projection: projection.register_full_backward_hook(print))
    assert "the forward of the output projection was replaced" in described(
        lambda each: setattr(each, "forward", print)
    )
    others = described(lambda projection: setattr(projection, "_forward_impl", print)), nn.Linear(16, 8)
    assert "is not megatron-core's own" in others[0]
    assert "is not megatron-core's own" in blueprint.head_of(others[1], weight)  # type: ignore


@pytest.mark.parametrize("mode", ["train", "recompute", "eval", "probe"])
def test_gradients_of_whole_logits_are_compared_in_training_alone(mode: Any, monkeypatch: Any) -> None:
    """A plan by measured times counts no comparison: batches after the first have none."""
    monkeypatch.setattr(VocabParallelLoss, "groups", {})
    blueprint = Blueprint(config(), vocab_size=8, max_sequence_length=4, parallel_output=False)
    blueprint.groups = SimpleNamespace(tp=SimpleNamespace(size=lambda: 2))  # type: ignore[assignment]
    hidden = torch.ones(4, 1, 8, dtype=torch.bfloat16, requires_grad=True)
    with push_slice(ActiveSlice(0, 4, 4, mode=mode)), torch.set_grad_enabled(mode != "eval"):
        logits = blueprint.logits(hidden, lambda hidden: (2 * hidden, None))  # type: ignore[arg-type]
        if mode != "eval":
            (3 * logits).sum().backward()
    assert blueprint.gradient_norms == ([3 * 32**0.5] if mode in ("train", "recompute") else [])


# -- specs ---------------------------------------------------------------------------------------------------


def test_experts_stand_where_the_frequency_says() -> None:
    experts = {"num_moe_experts": 2, "moe_router_load_balancing_type": "none", "add_bias_linear": False}
    shape = config(**experts, moe_layer_freq=[0, 1, 0, 1])
    assert [spec.submodules.mlp.module is MoELayer for spec in layer_specs(shape)] == [False, True, False, True]


def changed(**submodules: Any) -> ModuleSpec:
    spec = get_gpt_layer_local_spec()
    for name, value in submodules.items():
        setattr(spec.submodules, name, value)
    return spec


def attending(core: Any = DotProductAttention, **params: Any) -> ModuleSpec:
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = core
    spec.submodules.self_attention.params |= params
    return spec


@pytest.mark.parametrize(("spec", "what"), [
    (attending(type("Biased", (DotProductAttention,), {})), "has the core_attention Biased"),
    (attending(functools.partial(DotProductAttention, softmax_scale=1.0)), "has the core_attention functools.partial"),
    (attending(ModuleSpec(DotProductAttention, params={"softmax_scale": 1.0})), "has the core_attention ModuleSpec"),
    (attending(attn_mask_type=AttnMaskType.no_mask), "has attn_mask_type=AttnMaskType.no_mask, which is not causal"),
    (bert_layer_local_spec, "has attn_mask_type=AttnMaskType.padding, which is not causal"),
    (ModuleSpec(module=IdentityOp), "is of IdentityOp"),
    (changed(self_attention=IdentityOp), "has the self_attention IdentityOp"),
    (get_gpt_layer_local_spec(multi_latent_attention=True), "has the self_attention MLASelfAttention"),
    (changed(cross_attention=ModuleSpec(module=CrossAttention)), "has cross_attention"),
])  # fmt: skip
def test_specs_whose_attention_cannot_be_replaced_are_refused(spec: ModuleSpec, what: str) -> None:
    with pytest.raises(MegatronConfigError, match=f"transformer_layer_spec {what}"):
        layer_specs(config(), spec)


def test_megatrons_own_core_attention_is_replaced_however_the_spec_names_it() -> None:
    for core in (None, ModuleSpec(DotProductAttention), SlicedCoreAttention):
        [built] = layer_specs(config(num_layers=1), attending(core))
        assert built.submodules.self_attention.submodules.core_attention is SlicedCoreAttention


def test_given_specs_get_our_attention_too_and_there_is_one_for_each_layer() -> None:
    given = [get_gpt_layer_local_spec() for _ in range(4)]
    for built in (layer_specs(config(), given), layer_specs(config(), given[0])):
        assert [spec.submodules.self_attention.submodules.core_attention for spec in built] == [SlicedCoreAttention] * 4
    with pytest.raises(MegatronConfigError, match="3 specs for num_layers=4"):
        layer_specs(config(), given[:3])
    with pytest.raises(MegatronConfigError, match="is of TransformerBlockSubmodules for num_layers=4"):
        layer_specs(config(), TransformerBlockSubmodules(layer_specs=given))  # type: ignore[arg-type]


def test_kernels_are_those_of_the_machine_and_the_log_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, local = config(transformer_impl="transformer_engine"), config(transformer_impl="local")
    own, rms = "decoder layers: megatron-core's own", config(transformer_impl="local", normalization="RMSNorm")
    installed = True
    monkeypatch.setattr(compat, "has", lambda package: installed)
    assert kernels.norm_class(local) is TorchNorm and not kernels.uses_transformer_engine(engine)
    assert kernels.describe_kernels(engine) == f"{own} (Transformer Engine needs a GPU), norms: TorchNorm"
    monkeypatch.setattr(kernels, "on_cpu", lambda: False)
    assert kernels.uses_transformer_engine(engine) and not kernels.uses_transformer_engine(local)
    assert kernels.norm_class(local) is kernels.FusedLayerNorm and kernels.norm_class(rms) is TorchNorm
    installed = False
    assert "(Transformer Engine is not installed)" in kernels.describe_kernels(engine)
    assert kernels.describe_kernels(local) == f"{own}, norms: TorchNorm"


# -- attention -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["hidden_dropout", "attention_dropout", "moe_input_jitter_eps"])
def test_ranks_with_tokens_of_their_own_draw_from_the_tracker(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own state is the same on tensor-parallel ranks, which would draw the same numbers for other tokens."""
    monkeypatch.setattr(tensor_parallel.get_cuda_rng_tracker(), "fork", lambda: "of the tracker")
    rates = {"hidden_dropout": 0.0, "attention_dropout": 0.0, name: 0.1}
    divided = config(sequence_parallel=True, tensor_model_parallel_size=2, **rates)
    assert Blueprint.random_numbers(SimpleNamespace(config=divided)) == "of the tracker"  # type: ignore[arg-type]


@pytest.mark.parametrize("argument", ["attention_mask", "attention_bias", "packed_seq_params"])
def test_masks_biases_and_packing_are_refused(argument: str) -> None:
    attention = SlicedCoreAttention(config(), layer_number=1)
    heads = torch.randn(3, 1, 4, 4)
    with pytest.raises(ValueError, match=f"Leave {argument} out; documents are .* terapipe.documents"):
        attention(heads, heads, heads, **{argument: torch.ones(1)})


@pytest.mark.parametrize("scale", [None, 0.3])
def test_without_slices_it_is_causal_attention_over_grouped_heads(scale: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    attention = SlicedCoreAttention(config(attention_dropout=0.0), layer_number=1, softmax_scale=scale)
    query = torch.randn(5, 2, 4, 4, generator=generator, dtype=torch.float64)
    key, value = (torch.randn(5, 2, 2, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    q, k, v = (heads.permute(1, 2, 0, 3) for heads in (query, key, value))  # [B, H, T, D]
    scores = q @ k.repeat_interleave(2, 1).transpose(2, 3) * (scale or 0.5)
    scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))
    wanted = (scores.softmax(-1) @ v.repeat_interleave(2, 1)).permute(2, 0, 1, 3).flatten(2)
    torch.testing.assert_close(attention(query, key, value), wanted)


@pytest.mark.parametrize("kind", ["vanilla", "off-by-one", "learnable"])
def test_sinks_are_those_of_megatrons_own_attention(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, dtype, result, initial values and what a user's `init_method` did; norms and checkpoints read marks."""
    monkeypatch.setattr(parallel_state, "_GLOBAL_MEMORY_BUFFER", GlobalMemoryBuffer())
    shape = config(softmax_type=kind, num_query_groups=2)
    groups = SimpleNamespace(tp=SimpleNamespace(rank=lambda: 0, size=lambda: 1))
    kernels.stand_in_for_cuda()
    state = {"model-parallel-rng": torch.get_rng_state()}  # for its dropout
    monkeypatch.setattr(tensor_parallel.get_cuda_rng_tracker(), "states_", state)
    both = []
    for kind_of_attention in (SlicedCoreAttention, DotProductAttention):
        torch.manual_seed(3)
        both.append(kind_of_attention(shape, 1, AttnMaskType.causal, "self", pg_collection=groups))
    ours, theirs = (dict(attention.named_parameters()) for attention in both)
    assert ours.keys() == theirs.keys() == ({"softmax_offset"} if kind == "learnable" else set())
    for name, parameter in ours.items():
        assert parameter.dtype == theirs[name].dtype and torch.equal(parameter, theirs[name])
        assert is_split(parameter) and parameter.partition_dim == 0
    inputs = [torch.randn(5, 2, heads, 4, dtype=torch.float64) for heads in (4, 2, 2)]
    mask = torch.ones(1, 1, 5, 5).triu(1).bool()
    torch.testing.assert_close(both[0].eval()(*inputs), both[1].eval()(*inputs, mask))


def test_ranks_draw_parts_of_the_same_sinks() -> None:
    def drawn(rank: int, ranks: int) -> torch.Tensor:
        torch.manual_seed(3)
        groups = SimpleNamespace(tp=SimpleNamespace(rank=lambda: rank, size=lambda: ranks))
        return SlicedCoreAttention(config(softmax_type="learnable"), 1, pg_collection=groups).softmax_offset

    assert torch.equal(torch.cat([drawn(0, 2), drawn(1, 2)]), drawn(0, 1))


# -- the extra -----------------------------------------------------------------------------------------------


def test_without_megatron_core_the_import_says_which_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.startswith("terapipe_ds.models.megatron")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(compat.versions, "has_megatron", lambda: False)
    with pytest.raises(ImportError, match=r"pip install megatron-core==") as caught:
        import terapipe_ds.models.megatron  # noqa: F401
    assert isinstance(caught.value, compat.CompatError)
