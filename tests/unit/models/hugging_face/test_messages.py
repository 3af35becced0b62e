"""What is refused in words: arguments, kinds of models, names that are no folders, and versions of transformers."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("peft", reason="needs the extra hf: pip install terapipe_ds[hf]")

import torch
from huggingface_hub.utils import filter_repo_objects
from peft import AdaLoraConfig, IA3Config, LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    BertConfig,
    LlamaForCausalLM,
    MvpConfig,
    T5Config,
    XLMConfig,
)
from transformers import __version__ as installed

import terapipe_ds
from terapipe_ds import compat
from terapipe_ds.models.hugging_face import ModelRefusedError, refusals
from terapipe_ds.models.hugging_face.create import _family_named, _folders, model_without_weights
from terapipe_ds.models.hugging_face.forward.outline import Outline
from terapipe_ds.models.hugging_face.refusals import check_arguments, check_config, language_model_of
from terapipe_ds.models.hugging_face.weights.adapters import Adapters, with_adapters
from terapipe_ds.models.hugging_face.weights.quantized import ask_for
from terapipe_ds.models.hugging_face.weights.stored import INDEX, _files
from tests.hugging_face_families import config_of


@pytest.mark.parametrize("make", [terapipe_ds.from_config, terapipe_ds.from_pretrained], ids=lambda each: each.__name__)
@pytest.mark.parametrize(("arguments", "remedy"), [
    ({"attn_implementation": "sdpa"}, "leave it out: sliced_attention"),
    ({"device_map": "auto"}, "DeepSpeed gives each rank its device"),
    ({"load_in_4bit": True}, r"quantization_config=BitsAndBytesConfig\(load_in_4bit=True\)"),
    ({"trust_remote_code": True}, "AutoModelForCausalLM.register"),
    ({"cache_dir": "here"}, "HF_HUB_CACHE"),
    ({"num_stage": 2}, "did you mean num_stages?"),
    ({"use_cache": False}, "leave it out, or set it in the config .*known are .*checkpoint_interval.*topology"),
    ({"dtype": "bf16"}, "dtype='bf16' is no floating dtype of torch.*leave it out"),
    ({"torch_dtype": "int8"}, "give torch.bfloat16"),
    ({"dtype": torch.int8}, "no floating dtype"),
], ids=lambda each: "-".join(each) if isinstance(each, dict) else "")  # fmt: skip
def test_arguments_that_nobody_takes(make: Callable[..., Any], arguments: dict[str, Any], remedy: str) -> None:
    """Before anything is read or built, so that they need neither a folder nor other ranks."""
    with pytest.raises(TypeError, match=remedy):
        make("somewhere", **arguments)


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_names_of_dtypes_and_arguments_that_ask_for_nothing(name: str) -> None:
    nothing = {"device_map": None, "trust_remote_code": False, "quantization_config": None}
    options: dict[str, Any] = {"seed_layers": True, **nothing}
    arguments = {"dtype": None, "options": options} | ({"dtype": "bfloat16"} if name == "dtype" else {})
    options |= {} if name == "dtype" else {name: "bfloat16"}
    assert check_arguments(**arguments) is torch.bfloat16
    assert options == {"seed_layers": True}
    assert check_arguments("auto", {}) is None


def test_the_hub_is_asked_once_per_rank_with_its_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A skeleton has the name on the hub, no values, and the generation config. Nothing is downloaded twice."""
    needed = ["config.json", "model-00001-of-00002.safetensors", "chat_templates/tools.jinja"]
    files = [*needed, "consolidated.safetensors", "consolidated-00001-of-00009.safetensors", "f16/model.safetensors"]
    model = AutoModelForCausalLM.from_config(config_of("llama"))
    model.generation_config.max_new_tokens = 17
    model.save_pretrained(tmp_path)
    asked = []

    def download(name: str, **options: Any) -> str:
        patterns = {key: options.pop(key) for key in ("allow_patterns", "ignore_patterns")}
        asked.append((name, options, list(filter_repo_objects(files, **patterns))))
        return str(tmp_path)

    monkeypatch.setattr("terapipe_ds.models.hugging_face.create.snapshot_download", download)
    skeleton = terapipe_ds.skeleton("some/model", dtype="bfloat16", revision="v1", local_files_only=True)
    assert asked == [("some/model", {"revision": "v1", "local_files_only": True}, needed)]
    assert skeleton.config.name_or_path == "some/model" and skeleton.generation_config.max_new_tokens == 17
    assert all(parameter.is_meta and parameter.dtype is torch.bfloat16 for parameter in skeleton.parameters())
    with pytest.raises(TypeError, match="skeleton takes no loss_fn"):
        terapipe_ds.skeleton(tmp_path, loss_fn=None)
    with pytest.raises(TypeError, match="from_config reads nothing from the hub: leave out revision"):
        terapipe_ds.from_config(model.config, revision="v1")


def test_adapters_on_the_hub_have_another_revision_than_their_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def download(name: str, *, revision: str | None, token: str, **_: Any) -> str:
        asked.append((name, revision, token))
        return str(tmp_path)

    LoraConfig(base_model_name_or_path="some/model", revision="of model").save_pretrained(str(tmp_path))
    monkeypatch.setattr("terapipe_ds.models.hugging_face.create.snapshot_download", download)
    of_hub = {"revision": "of adapters", "token": "t"}
    assert _folders("some/adapters", None, of_hub) == ("some/model", tmp_path, tmp_path)
    assert asked == [("some/adapters", "of adapters", "t"), ("some/model", "of model", "t")]
    assert _folders(tmp_path, None, {"revision": "of user", "token": "t"}) == ("some/model", tmp_path, tmp_path)
    assert asked[2:] == [("some/model", "of user", "t")]


def test_a_name_that_is_nowhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelRefusedError, match="'no/such' is no folder, and not on the hub or in its cache: "):
        terapipe_ds.skeleton("no/such", local_files_only=True)


def test_arguments_of_pipeline_modules_are_taken() -> None:
    """As far as the config, which is none."""
    with pytest.raises(TypeError, match="a str is no config of transformers"):
        terapipe_ds.from_config("gpt2", activation_checkpoint_interval=1, seed_layers=True)


@pytest.mark.parametrize(("config", "says"), [
    (AdaLoraConfig(target_modules=["q_proj"], total_step=10), "LoraConfig, and not of AdaLoraConfig"),
    (IA3Config(target_modules=["q_proj"], feedforward_modules=[]), "LoraConfig, and not of IA3Config"),
    (PromptTuningConfig(num_virtual_tokens=2), "LoraConfig, and not of PromptTuningConfig"),
    (LoraConfig(target_modules=["q_proj"], trainable_token_indices=[1, 2]), 'modules_to_save=."embed_tokens"'),
    (LoraConfig(target_modules=["q_proj"], layer_replication=[(0, 2), (1, 2)]), "save a model that has them"),
    (LoraConfig(target_modules=["q_proj"], alora_invocation_tokens=[1]), "alora_invocation_tokens=.*leave it out"),
    (LoraConfig(target_modules=["q_proj"], init_lora_weights="pissa"), "init_lora_weights 'pissa'"),
    ({"r": 4}, "a LoraConfig or a folder of peft, not a dict"),
    ("somebody/adapters", r"no folder with adapter_config.*snapshot_download\('somebody/adapters'\)"),
], ids=lambda each: "")  # fmt: skip
def test_adapters_that_stages_do_not_hold(config: Any, says: str) -> None:
    with pytest.raises(ModelRefusedError, match=says):
        with_adapters(config, model_without_weights(config_of("llama"), None))


def test_a_tied_matrix_is_no_option_of_adapters() -> None:
    """peft notes it in the config of a model in memory."""
    config = config_of("llama")
    config.tie_word_embeddings = True
    asked = LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens"], ensure_weight_tying=True)
    model = get_peft_model(model_without_weights(config, None), asked, low_cpu_mem_usage=True)
    whole = with_adapters(model, model_without_weights(config, None))
    with pytest.raises(ModelRefusedError, match="the output matrix as well.*leave both out of target_modules"):
        Adapters(asked, whole, Outline(model_without_weights(config, None)), 0)


def test_a_skeleton_loads_no_values(tmp_path: Path) -> None:
    """peft would load them into nothing, and training would begin with new adapters."""
    model = AutoModelForCausalLM.from_config(config_of("llama"))
    model.save_pretrained(tmp_path)
    get_peft_model(model, LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "adapters")
    says = "a skeleton has no values, and loads none.*adapter= of from_pretrained"
    for options in ({}, {"low_cpu_mem_usage": True}):
        with pytest.raises(ModelRefusedError, match=says):
            PeftModel.from_pretrained(terapipe_ds.skeleton(tmp_path), tmp_path / "adapters", **options)


def test_every_option_of_adapters_is_served_or_refused() -> None:
    """One that peft adds later is refused where it is set."""
    config = LoraConfig(target_modules=["q_proj"])
    config.brand_new = 3  # type: ignore[attr-defined]
    with pytest.raises(ModelRefusedError, match=r"LoraConfig\(brand_new=3\) is not served: leave it out"):
        with_adapters(config, model_without_weights(config_of("llama"), None))


def test_other_kinds_of_models() -> None:
    model = AutoModelForSequenceClassification.from_config(config_of("llama"))
    with pytest.raises(ModelRefusedError, match="LlamaForSequenceClassification is not .*which is LlamaForCausalLM"):
        language_model_of(model)
    sizes = {"vocab_size": 4, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    encoder_decoder = AutoModelForSeq2SeqLM.from_config(T5Config(**sizes))
    with pytest.raises(ModelRefusedError, match="has no class for a T5Config: pass a model that decodes text alone"):
        language_model_of(encoder_decoder)
    causal = AutoModelForCausalLM.from_config(config_of("llama"))
    assert type(language_model_of(get_peft_model(causal, LoraConfig(target_modules=["q_proj"])))) is LlamaForCausalLM
    config = config_of("llama")
    config.architectures = ["LlamaForSequenceClassification"]  # of a folder
    with pytest.raises(ModelRefusedError, match="is a LlamaForSequenceClassification and no causal language model"):
        check_config(config)
    later = "tokens attend to later ones"
    reasons = (T5Config(), "no causal language model of a T5Config"), (BertConfig(), later), (XLMConfig(), later)
    for config, why in reasons:
        with pytest.raises(ModelRefusedError, match=f"{config.model_type} cannot be trained.*{why}") as raised:
            terapipe_ds.from_config(config)
        # their layers fail in a PipelineModule too
        assert "PipelineModule" not in str(raised.value) and "Take a causal language model" in str(raised.value)
    # a decoder on its own, also where its class makes it causal
    for config in (BertConfig(is_decoder=True), XLMConfig(causal=True), MvpConfig(is_encoder_decoder=False)):
        check_config(config)


@pytest.mark.parametrize("weight_map", [None, ["key"], {"key": 1}, {"key": "../a"}, {"key": "/a"}])
def test_an_index_that_names_no_files_of_its_folder(weight_map: Any, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelRefusedError, match="has no weight_map of keys to names of files in the folder"):
        _files(tmp_path, config_of("llama"))


def _with_shared_weights(model: Any) -> None:
    model.model.layers[1].mlp = model.model.layers[0].mlp


def _with_a_tied_bias(model: Any) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(64, device="meta"))


def _with_a_module_beside(model: Any) -> None:
    model.beside = torch.nn.Linear(2, 2, device="meta")


def _with_layers_that_run_twice(model: Any) -> None:
    run = model.model.forward
    model.model.forward = lambda **options: (run(**options), run(**options))[1]


@pytest.mark.parametrize(("change", "says"), [
    (_with_shared_weights, "gate_proj.weight of LlamaDecoderLayer is shared by several layers"),
    (_with_a_tied_bias, "tied to the embedding, and has a bias of its own"),
    (_with_a_module_beside, "its forward is not a list of decoder layers between other modules"),
    (_with_layers_that_run_twice, "its 2 decoder layers run 4 times in a forward"),
], ids=lambda each: getattr(each, "__name__", ""))  # fmt: skip
def test_forwards_that_are_no_list_of_layers(change: Callable[[Any], None], says: str) -> None:
    model = model_without_weights(config_of("llama"), None)
    change(model)
    with pytest.raises(ModelRefusedError, match=says):
        Outline(model)


# -- versions of transformers


def test_the_cache_argument_of_each_version() -> None:
    for version, name in (("4.57.6", "past_key_values"), ("5.23.0", "past_key_values"), ("5.24.0.dev0", "cache")):
        assert compat.cache_arguments(version)[0] == name
    assert compat.cache_arguments("6.1")[0] == "cache"
    assert "cache" not in compat.cache_arguments("5.23.0")  # XLM has another thing of that name


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_a_version_with_another_name_is_blamed_and_no_family(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("terapipe_ds.compat.versions.CACHE_ARGUMENTS", {"4.57": ("a_name_of_later",)})
    config = config_of(family)
    tested = compat.TESTED_VERSIONS["transformers"]
    says = f"transformers {installed} differs from the versions .* transformers=={tested}"
    with pytest.raises(ModelRefusedError, match=says) as raised, _family_named(config):
        Outline(model_without_weights(config, None))
    assert "PipelineModule" not in str(raised.value)


def test_a_change_of_another_kind_is_blamed_on_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("terapipe_ds.models.hugging_face.forward.cache._Layer.get_mask_sizes")
    with pytest.raises(ModelRefusedError, match=f"transformers {installed} differs"), _family_named(config_of("gemma")):
        Outline(model_without_weights(config_of("gemma"), None))


def test_a_family_that_cannot_run_is_not_blamed_on_the_version() -> None:
    says = "ctrl cannot be trained.*PipelineModule"
    with pytest.raises(ModelRefusedError, match=says), _family_named(config_of("ctrl")):
        Outline(model_without_weights(config_of("ctrl"), None))


@pytest.mark.parametrize(("stored", "asked", "text"), [
    ({"quant_method": "gptq", "bits": 4}, None, r"quantized \(quant_method gptq\).*the folder of the original"),
    ({"quant_method": "bitsandbytes", "load_in_8bit": True}, None, r"quantized \(load_in_8bit\)"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, {"load_in_4bit": True}, "leave out quantization_config"),
    (None, {"load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"}, "'bfloat16' is for FSDP"),
    (None, {"load_in_4bit": True, "llm_int8_enable_fp32_cpu_offload": True}, "needs a device_map"),
], ids=["other method", "8 bits", "twice", "storage", "offload"])  # fmt: skip
def test_ways_of_quantization(stored: dict[str, Any] | None, asked: dict[str, Any] | None, text: str) -> None:
    config = config_of("llama")
    if stored is not None:
        config.quantization_config = stored
    with pytest.raises(ModelRefusedError, match=text):
        ask_for(asked, config)


def test_random_weights_are_not_quantized() -> None:
    with pytest.raises(TypeError, match="from_pretrained quantizes those of a folder"):
        terapipe_ds.from_config(config_of("llama"), quantization_config={"load_in_4bit": True})
    config = config_of("llama")
    config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    with pytest.raises(ModelRefusedError, match="random weights are not quantized: remove it from the config"):
        terapipe_ds.from_config(config)


def test_a_missing_bitsandbytes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.quantizers.quantizer_bnb_4bit.is_bitsandbytes_available", lambda **_: False)
    with pytest.raises(ModelRefusedError, match=r"requires .*bitsandbytes.*terapipe_ds\[qlora\]"):
        ask_for({"load_in_4bit": True}, config_of("llama"))


def test_ranks_connect_once_for_all_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group connects each rank to all others, and a save gathers nine times."""
    made, used = list[Any](), list[Any]()
    stand_ins: dict[str, Callable[..., Any]] = {
        "get_backend": lambda: "nccl",
        "get_world_size": lambda: 1,
        "new_group": lambda **options: made.append(options) or "host",
        "destroy_process_group": print,
        "all_gather_object": lambda values, value, group: used.append(group),
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.distributed, name, stand_in)
    monkeypatch.setattr(torch.distributed, "group", SimpleNamespace(WORLD=object()))
    for _ in range(3):
        with refusals.refused_on_all_ranks():
            pass
    assert made == [{"backend": "gloo"}] and used == ["host"] * 3
