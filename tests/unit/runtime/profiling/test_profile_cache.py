"""How what the ranks have measured becomes one profile."""

import dataclasses
import logging
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from terapipe_ds.attention import backends
from terapipe_ds.config import TeraPipeConfig
from terapipe_ds.costs.profile import CostSample, LayerProfile, LinkSample, Overhead, Profile, ProfileError, ProfileKey
from terapipe_ds.planner.memory import PartMemory
from terapipe_ds.runtime.layers.activation_checkpointing import set_recompute
from terapipe_ds.runtime.profiling import profiles
from terapipe_ds.runtime.profiling.all_parts import PartMeasured
from terapipe_ds.runtime.profiling.cache import cache_path, combine, read_cache, with_own_time, write_cache
from terapipe_ds.runtime.profiling.key import LayersOfPart, _arithmetic, profile_key
from terapipe_ds.runtime.profiling.layer_times import LayerMeasured
from terapipe_ds.runtime.profiling.profiles import _read_profile

KEY = ProfileKey("f", "m", "cpu", "fp32", 1, 2, 2, False, 64, "flash")
NO_MESSAGES = ((16, 0.0), (64, 0.0))


def rank(
    stage_id: int, replica_id: int, forward: tuple[float, float], backward: tuple[float, float] = (1.0, 1.0),
    send: float = 1.0, messages: Any = NO_MESSAGES,
) -> PartMeasured:  # fmt: skip
    """A rank that has measured slices of 16 and of 64 tokens."""
    samples = tuple(CostSample(t, 0, f, b) for t, f, b in zip((16, 64), forward, backward, strict=True))
    links = [LinkSample(16, send, stage_id)] if stage_id == 0 else []
    return PartMeasured(stage_id, replica_id, samples, PartMemory(1, 1.0), links=links, message_s=dict(messages))


def times(profile: Profile, part_id: int) -> list[tuple[float, float]]:
    return [(s.forward_s, s.backward_s) for s in profile.parts[part_id].samples]


def test_the_slowest_of_tensor_parallel_peers_counts_point_by_point() -> None:
    costs = [
        rank(0, 0, (1.0, 5.0), (2.0, 2.0), send=3.0), rank(0, 0, (2.0, 4.0), (1.0, 3.0), send=7.0),
        rank(1, 0, (1.0, 1.0)), rank(1, 0, (1.0, 9.0)),
    ]  # fmt: skip
    profile = combine(KEY, costs)
    assert times(profile, 0) == [(2.0, 2.0), (5.0, 3.0)]
    assert times(profile, 1) == [(1.0, 1.0), (9.0, 1.0)]
    assert [(link.part_id, link.send_s) for link in profile.links] == [(0, 7.0), (1, 7.0)]


def test_the_median_of_replicas_is_taken_after_that() -> None:
    """Three replicas of two peers: the slowest take 4, 3 and 100, of which 4 is the median. The median of all six, 3.5,
    and the slowest of all, 100, would be other numbers. Ranks may come in any order."""
    forward = {0: (4.0, 1.0), 1: (3.0, 3.0), 2: (100.0, 99.0)}
    pairs = [(replica_id, pair[peer]) for peer in (0, 1) for replica_id, pair in forward.items()]
    costs = [rank(0, replica_id, (f, f)) for replica_id, f in pairs]
    stage_1 = [rank(1, replica_id, (1.0, 1.0)) for replica_id in (2, 0, 1) for _ in range(2)]
    profile = combine(dataclasses.replace(KEY, num_stages=2), [*reversed(costs), *stage_1])
    assert times(profile, 0) == [(4.0, 1.0)] * 2
    assert statistics.median(f for pair in forward.values() for f in pair) == 3.5


def test_what_messages_cost_a_peer_is_part_of_its_time() -> None:
    costs = [rank(0, 0, (1.0, 1.0)), rank(0, 0, (0.5, 0.5), messages=((16, 2.0), (64, 4.0))), rank(1, 0, (1.0, 1.0))]
    assert times(combine(KEY, costs), 0) == [(2.5, 3.0), (4.5, 5.0)]


def test_a_kept_profile_of_an_earlier_version_is_measured_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("terapipe_ds"), "propagate", True)
    path, profile = tmp_path / "profile.json", combine(KEY, [rank(i, 0, (1.0, 1.0)) for i in (0, 1)])
    write_cache(path, profile)
    assert read_cache(path, KEY) == profile
    path.write_text(path.read_text().replace('"version": 2', '"version": 1'))
    with caplog.at_level("WARNING", logger="terapipe_ds"):
        assert read_cache(path, KEY) is None
    assert "has version 1, this package reads 2" in caplog.text


def layer(kind: str, *forward: float, kept: float = 1.0) -> LayerMeasured:
    samples = tuple(CostSample(tokens, 0, f, 2 * f) for tokens, f in zip((16, 64), forward, strict=True))
    return LayerMeasured(kind, LayerProfile(samples, 7, 5, 8.0, {"slice_bytes_per_token": kept, "whole": None}))


def test_equal_layers_are_one_kind_wherever_they_are() -> None:
    """Of peers the slowest counts, and of equal layers the median."""
    peers = [(layer("embedding", 9.0, 9.0), layer("decoder", 1.0, 4.0))]
    peers.append((layer("embedding", 8.0, 9.5), layer("decoder", 2.0, 3.0)))
    last = layer("decoder", 3.0, 5.0, kept=3.0), layer("decoder", 7.0, 7.0, kept=5.0)
    costs = [dataclasses.replace(rank(0, 0, (1.0, 1.0)), layers=layers) for layers in peers]
    costs.append(dataclasses.replace(rank(1, 0, (1.0, 1.0)), layers=last))
    layers = combine(KEY, costs).layers
    assert layers is not None
    assert (layers.kind_of, layers.bounds) == ((0, 1, 1, 1), (0, 2, 4))
    times = [[(sample.forward_s, sample.backward_s) for sample in kind.samples] for kind in layers.kinds]
    assert times == [[(9.0, 18.0), (9.5, 19.0)], [(3.0, 6.0), (5.0, 10.0)]]
    assert [kind.memory for kind in layers.kinds] == [
        {"slice_bytes_per_token": 1.0, "whole": None}, {"slice_bytes_per_token": 3.0, "whole": None}
    ]  # fmt: skip
    assert combine(KEY, [*costs[:2], dataclasses.replace(costs[2], layers=None)]).layers is None


def test_what_parts_take_beyond_their_layers_is_the_engines_time_and_that_of_messages() -> None:
    samples = CostSample(16, 0, 5.0, 6.0), CostSample(64, 0, 7.0, 8.0)
    cost = dataclasses.replace(rank(0, 0, (1.0, 1.0), messages=((16, 2.0), (64, 4.0))), samples=samples)
    measured = combine(dataclasses.replace(KEY, num_stages=1), [cost])
    (part,) = measured.parts
    assert part.overheads == (Overhead(16, 2.0, 2.0), Overhead(64, 4.0, 4.0))
    assert [sample.forward_s for sample in part.samples] == [7.0, 11.0]
    (part,) = with_own_time(measured, {0: (0.5, 0.75)}).parts
    assert part.overheads == (Overhead(16, 2.5, 2.75), Overhead(64, 4.5, 4.75))
    assert [(sample.forward_s, sample.backward_s) for sample in part.samples] == [(7.5, 8.75), (11.5, 12.75)]


@pytest.mark.parametrize(("granularity", "warns"), [(192, False), (96, True)])
def test_a_given_profile_is_too_coarse_for_shorter_slices_than_it_has(
    granularity: int, warns: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key, path = dataclasses.replace(KEY, sequence_length=768), str(tmp_path / "profile.json")
    samples = tuple(CostSample(tokens, 0, 1.0, 1.0) for tokens in (192, 768))
    ranks = [dataclasses.replace(rank(i, 0, (1.0, 1.0)), samples=samples) for i in (0, 1)]
    combine(key, ranks).save(path)
    with caplog.at_level("WARNING", logger="terapipe_ds"):
        given = _read_profile(path, key, granularity)
    assert ["plans are cut at multiples of" in record.message for record in caplog.records] == [True] * warns
    assert given == Profile.load(path)


@pytest.mark.parametrize(("given", "granule"), [({}, 256), ({"granularity_tokens": 64}, 64)])
def test_a_given_profile_is_compared_with_the_granules_of_the_search(
    given: dict[str, Any], granule: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TeraPipeConfig(enabled=True, slices="auto", planner={"profile": "profile.json"}, **given)
    monkeypatch.setattr(profiles, "key_of", lambda *_: KEY)
    monkeypatch.setattr(profiles, "_read_profile", lambda *arguments: arguments[-1])
    monkeypatch.setattr(profiles, "from_rank_0", lambda ask, _: ask())
    stage: Any = SimpleNamespace(engine=None, groups=SimpleNamespace(world=None), config=config)
    drawn: list[Any] = [(None, SimpleNamespace(rows=1))]
    assert profiles.Profiles(stage, None, print)._profile_for(65_536, drawn) == granule  # type: ignore[arg-type]


# -- what a profile is valid for -----------------------------------------------------------------------------------


def _optimizer(momentum: float = 0.9, is_narrow: bool = False) -> Any:
    return SimpleNamespace(low_precision_master_weights_and_grads=is_narrow, param_groups=[{"momentum": momentum}])


def _file_of(monkeypatch: pytest.MonkeyPatch, section: dict[str, Any], **changes: Any) -> Path:
    """Return the file of a job's profile in `cache_dir`; `changes` are of its engine."""
    given: dict[str, Any] = {
        "zero_optimization_stage": 1, "get_data_types": (torch.bfloat16, torch.float32), "zero_cpu_offload": False,
        "zero_reduce_bucket_size": 1000, "zero_contiguous_gradients": True, "optimizer_name": "adam",
    }  # fmt: skip
    loss = changes.pop("loss_fn", nn.functional.cross_entropy)
    fields = {"device": "cpu", "module": SimpleNamespace(loss_fn=loss), "seq_dp_world_size": 2, "num_stages": 2}
    fields |= {"optimizer": _optimizer()}
    fields |= {name: changes.pop(name) for name in [*fields] if name in changes}
    asked = {name: lambda value=value: value for name, value in (given | changes).items()}
    monkeypatch.setattr(profiles, "gather", lambda own, group: [own])
    config = TeraPipeConfig(enabled=True, **section)
    stage: Any = SimpleNamespace(
        engine=SimpleNamespace(**fields, **asked), groups=SimpleNamespace(world=None), config=config
    )
    of_job = profiles.Profiles(stage, None, print)  # type: ignore[arg-type]
    return cache_path("folder", KEY, of_job._not_in_key(4096))


@pytest.mark.parametrize("changes", [
    {"zero_optimization_stage": 0}, {"get_data_types": (torch.bfloat16, torch.bfloat16)}, {"zero_cpu_offload": True},
    {"zero_reduce_bucket_size": 2000}, {"zero_contiguous_gradients": False}, {"optimizer_name": "sgd"},
    {"seq_dp_world_size": 4}, {"num_stages": 1}, {"loss_fn": nn.functional.nll_loss}, {"loss_fn": None},
    {"optimizer": _optimizer(is_narrow=True)}, {"optimizer": nn.Linear(1, 1)},
    {"section": {"granularity_tokens": 128}}, {"section": {"offload_activations": True}},
    {"section": {"compile": True}}, {"section": {"links": {"forward": "int8"}}},
    {"section": {"recompute": "full", "keep_attention": True}},
])  # fmt: skip
def test_a_job_whose_costs_or_bytes_differ_has_a_file_of_its_own(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = _file_of(monkeypatch, {})
    assert _file_of(monkeypatch, {}) == usual and _file_of(monkeypatch, {"check_finite": "every_step"}) == usual
    assert _file_of(monkeypatch, changes.pop("section", {}), **changes) != usual
    momenta = {_file_of(monkeypatch, {}, optimizer_name="sgd", optimizer=_optimizer(m)) for m in (0.0, 0.9, 0.8)}
    assert len(momenta) == 2
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 77)
        assert _file_of(monkeypatch, {}) != usual


def test_a_given_profile_is_of_as_many_threads_and_the_same_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that the config names was read whatever these are, and its times were several times too short or long."""
    profile = combine(_key(), [rank(0, 0, (1.0, 1.0))])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    with pytest.raises(ProfileError, match="device: the profile has .*, this run .*, 77 threads; measure on this run"):
        profile.require(_key())
    assert _arithmetic(torch.float32, None, "cuda") == "float32"
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision="tf32"))
    assert _arithmetic(torch.float32, None, "cuda") == "float32 (products in tf32)"
    assert _arithmetic(torch.float32, None, "cpu") == "float32" and _arithmetic(torch.half, None, "cuda") == "float16"
    assert _arithmetic(torch.float32, torch.half, "cuda") == "float32 (autocast float16)"


def _key(interval: int = 0, keeps: bool | None = None, **changes: Any) -> ProfileKey:
    module: Any = nn.Linear(2, 2)
    if keeps is not None:
        recompute: Any = "full" if interval else "off"
        module.num_stages, module.stage_id, module.activation_checkpoint_interval = 1, 0, 0
        module.activation_checkpoint_func = module.checkpointable_layers = None
        set_recompute(module, TeraPipeConfig(enabled=True, recompute=recompute, keep_attention=keeps), {})
    return profile_key([_part(interval)], module=module, device=torch.device("cpu"), rows=2, length=64, **changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"tensor_parallel": 2}, "tensor_parallel"), ({"slice_length_multiple": 2}, "slices in multiples of 2 tokens")],
)
def test_tensor_and_sequence_parallelism_are_in_the_key(changes: dict[str, Any], named: str) -> None:
    costs = [rank(0, 0, (1.0, 1.0))]
    profile = combine(_key(), costs)
    with pytest.raises(ProfileError) as caught:
        profile.require(_key(**changes))
    (line,) = str(caught.value).splitlines()[1:]
    assert named in line
    profile.require(_key(slice_length_multiple=1))


def test_which_parts_recompute_is_in_the_key() -> None:
    of_none, of_first, of_second, of_all = (
        profile_key([_part(one), _part(two)], module=nn.Linear(2, 2), device=torch.device("cpu"), rows=2, length=64)
        for one, two in ((0, 0), (1, 0), (0, 1), (1, 1))
    )
    for name in ("model_fingerprint", "layers_fingerprint"):
        assert len({getattr(key, name) for key in (of_none, of_first, of_second, of_all)}) == 4, name
    assert [key.activation_checkpointing for key in (of_none, of_first)] == [False, True]


def _part(interval: int) -> LayersOfPart:
    layers = [["Linear", ["2", "2"], ""]]
    return LayersOfPart([layers, [[[2, 2], "torch.float32", True]], interval], layers)


def test_kept_attention_is_in_the_key_of_layers_that_recompute() -> None:
    """And only there, so that other profiles stay valid."""
    full, kept = _key(1, keeps=False), _key(1, keeps=True)
    assert full == _key(1) and _key(0, keeps=False) == _key(0)
    for one, other in ((full, kept), (kept, full)):
        with pytest.raises(ProfileError, match="attention kept"):
            combine(one, [rank(0, 0, (1.0, 1.0))]).require(other)
    assert full.layers_fingerprint != kept.layers_fingerprint


def test_no_measured_choice_of_a_kernel_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of kernels that are about as fast choose another one in each start."""
    monkeypatch.setattr(backends, "_takes", lambda kernel, *_: kernel.name in ("cudnn", "cuda_flash"))
    keys = []
    for cudnn_ms in (1.0, 2.0):
        times = {"cudnn": cudnn_ms, "cuda_flash": 1.5}
        monkeypatch.setattr(backends, "fastest", lambda *_, times=times: times)
        keys.append(_key())
    assert keys[0] == keys[1] and keys[0].attention_backend == "cudnn or cuda_flash"
    monkeypatch.setattr(backends, "_forced", backends.Reference())
    assert _key().attention_backend == "reference"
