"""Describe a model by profiles of it: one profile per number of tensor ranks and rows of a micro-batch.

A profile has the times of each layer with slices that run as in training, so its numbers include tensor-parallel
collectives and the engine's own time. Other tensor ranks and micro-batches are refused: nobody has timed them. The
memory is the measured memory of one replica without ZeRO. A profile does not know of tied layers, so their sum is not
counted.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from terapipe_ds.costs.analytic import OPTIMIZER_BYTES_PER_PARAMETER
from terapipe_ds.costs.devices import DeviceCard, device_card
from terapipe_ds.costs.interface import Costs
from terapipe_ds.costs.profile import Profile
from terapipe_ds.planner.cluster import Cluster
from terapipe_ds.planner.errors import PlannerError
from terapipe_ds.planner.layers.both_ways import line_of
from terapipe_ds.planner.layers.layer import Layer, costs_of_layers, layers_of_profile, memory_of_layers
from terapipe_ds.planner.layers.parts import Again, Floats, Layers, Setting, Span, bytes_summed
from terapipe_ds.planner.memory import PartMemory
from terapipe_ds.planner.model_memory import ITEMSIZE, bytes_of_step, optimizer_of

_SAME = ("device", "dtype", "sequence_length", "attention_backend")  # of all profiles of one model
_AGAIN = "measure with terapipe.planner.cache_dir, which times layers one by one"
_PASSES = {"ZeRO-0": (6, 7), "ZeRO-1": (6, 16)}
"""Numbers that a step moves per parameter, of all and of those whose states a rank has.

All gradients are copied to a buffer, scaled there, and copied back: two each (DeepSpeed 0.19.8, `allreduce_and_copy`).
Adam moves seven. ZeRO-1 also copies gradients together, takes their norm, scales them, and copies parameters out and
gradients in: nine (`stage_1_and_2.py`, `step`).
"""


def timed_layers(profile: Profile) -> list[Layer]:
    """Return the layers of a profile. Raises PlannerError where it lacks a part, its memory, or its layers' times."""
    what = f"the profile of {profile.key.model}"
    if len(profile.parts) != profile.key.num_stages:
        raise PlannerError(f"{what} has {len(profile.parts)} of {profile.key.num_stages} parts: measure all of them")
    if profile.layers is None:
        raise PlannerError(f"{what}: its layers were not timed one by one; {_AGAIN}")
    layers = layers_of_profile(profile)
    if any(layer.memory is None for layer in layers):
        raise PlannerError(f"{what}: the memory of its layers was not measured; measure in a running job: {_AGAIN}")
    return layers


class MeasuredLayers(Layers):
    """Hold the layers of a model, with costs from profiles of it, for sequences of one length.

    Raises:
        PlannerError: profiles of different models or devices, of shorter sequences, or without numbers for strategies.
    """

    is_sliceable, whole_is_least = True, False

    def __init__(self, profiles: Sequence[Profile], cluster: Cluster, sequence_length: int) -> None:
        self._cluster = cluster
        self._profiles = _by_size(profiles)
        key = profiles[0].key
        self.dtype, self.name = key.parameter_dtype, key.model
        if self.dtype not in ("float32", "float16", "bfloat16"):
            raise PlannerError(f"profiles are of {self.dtype}: strategies have float32, float16, bfloat16; measure so")
        if sequence_length > key.sequence_length:
            raise PlannerError(
                f"sequence_length = {sequence_length}: the profile is of {key.sequence_length} tokens; measure longer "
                "sequences, or give at most as many"
            )
        self._layers = {size: timed_layers(profile) for size, profile in self._profiles.items()}
        self._state_ranks = {size: profile.state_ranks or 1 for size, profile in self._profiles.items()}
        if self.dtype != "bfloat16" and (most := max(self._state_ranks.values())) > 1:
            raise PlannerError(f"a profile divided the optimizer's states over {most} ranks: measure with ZeRO 0")
        _check_models(self._profiles, self._layers)
        self.num_layers = len(next(iter(self._layers.values())))
        # made once: the search compares layers by identity
        self._costs = {
            (size, again): costs_of_layers(layers, recompute=again)
            for size, layers in self._layers.items()
            for again in self.kinds
        }

    def refuse_tensor(self, degree: int) -> str | None:
        measured = sorted({tensor for tensor, _ in self._layers})
        if degree in measured:
            return None
        return f"tensor_parallel = {degree} was not measured, but {_listed(measured)}: give a profile of it"

    def refuse_micro_batch(self, tensor: int, rows: int) -> str | None:
        measured = sorted(size for degree, size in self._layers if degree == tensor)
        if rows in measured:
            return None
        return (
            f"micro-batches of {rows} were not measured with {tensor} tensor ranks, but {_listed(measured)}: give a "
            "profile of them"
        )

    def layer_costs(self, setting: Setting, recompute: int) -> Sequence[Costs]:
        return self._costs[_size(setting), Again(recompute)]

    def overhead(self, setting: Setting, layer: int) -> Sequence[Costs]:
        own = self._layers[_size(setting)][layer].overhead
        return () if own is None else (own,)

    def output_bytes(self, setting: Setting) -> Floats:
        return np.array([layer.output_bytes for layer in self._layers[_size(setting)]], float)

    def memory_of_spans(self, setting: Setting, spans: Sequence[Span]) -> tuple[PartMemory, ...]:
        return tuple(self._memory(setting, span) for span in spans)

    def end_bytes(self, setting: Setting) -> tuple[Floats, Floats]:
        """Return the bytes that replicas sum, and the bytes that the memory moves during the optimizer's step.

        The step is measured; without a measurement it is counted. The states of bfloat16 are divided whatever the ZeRO
        stage. DeepSpeed's ZeRO-1 moves more than the plain optimizer: see `_PASSES`.
        """
        # replicas divide a share of the states; the measured step had the share of one rank of the measured job
        rate, share = self._cluster.card.reachable_bytes_per_s, 1.0
        if self.dtype == "bfloat16":
            share = 1 / setting.data
        elif setting.zero_stage:
            of_all, of_share = _PASSES["ZeRO-1"]
            share = (of_all + of_share / setting.data) / sum(_PASSES["ZeRO-0"])
        layers = self._layers[_size(setting)]
        trained = np.array([layer.trained for layer in layers], float)
        counted = OPTIMIZER_BYTES_PER_PARAMETER * trained
        rate *= self._state_ranks[_size(setting)]
        moved = [b if layer.step_s is None else layer.step_s * rate for layer, b in zip(layers, counted, strict=True)]
        return bytes_summed(self.dtype, setting.zero_stage) * trained, share * np.array(moved)

    def _memory(self, setting: Setting, span: Span) -> PartMemory:
        layers = self._layers[_size(setting)][span.start : span.stop]
        numbers = memory_of_layers(layers, span.recompute)
        return PartMemory(**numbers | self._states(setting, layers, numbers))

    def _states(self, setting: Setting, layers: Sequence[Layer], numbers: Mapping[str, Any]) -> dict[str, int]:
        """Return the lasting bytes; ZeRO-1, and any optimizer of bfloat16, divides the states among them.

        ZeRO-1 keeps gradients between batches, and a copy of fp32 parameters beside the states.
        """
        static, gradients = numbers["static_bytes"], numbers["gradient_bytes"]
        trained = sum(layer.trained for layer in layers)
        # as `Strategy.to_deepspeed` has it: sums in bf16 without ZeRO, in fp32 with it
        sums = "float32" if self.dtype == "bfloat16" and setting.zero_stage else self.dtype
        optimizer = optimizer_of(self.dtype, sums, setting.zero_stage)
        step = {"step_bytes": bytes_of_step(trained, optimizer, self.dtype, sums, setting.data)}
        if setting.zero_stage == 0 and self.dtype != "bfloat16":
            return {"static_bytes": math.ceil(static), "gradient_bytes": math.ceil(gradients)} | step
        # the measured bytes without parameters and gradients are the states
        parameters = ITEMSIZE[self.dtype] * sum(layer.parameters for layer in layers)
        kept = gradients or 4.0 * trained  # in `static` where the optimizer keeps them
        states = max(0.0, static - parameters - (0.0 if gradients else kept))
        states += parameters if self.dtype == "float32" else 0.0
        states *= self._state_ranks[_size(setting)] / setting.data
        return {"static_bytes": math.ceil(parameters + kept + states), "gradient_bytes": 0} | step


def measured_cluster(
    profile: Profile, nodes: int, devices_per_node: int, card: DeviceCard | str = "cpu", **links: float
) -> Cluster:
    """Return a cluster of the device that a profile measured, with its link between stages.

    Args:
        card: the device's memory and its bandwidth; times of layers come from the profile.
        links: rates and latencies of `Cluster` that replace the measured link, between nodes above all.

    Raises:
        PlannerError: the profile has no link, and `links` has no rate for it.
    """
    own: dict[str, Any] = {}
    if any(link.num_bytes is not None for link in profile.links):
        own["within_bytes_per_s"], own["within_latency_s"] = line_of(profile.links)
    elif "within_bytes_per_s" not in links:
        raise PlannerError(
            "the profile has no link: give its rate (--within-gb-per-s, within_bytes_per_s), or a profile of a job of "
            "several stages, with terapipe.planner.cache_dir"
        )
    named = device_card(card) if isinstance(card, str) else card
    return Cluster(dataclasses.replace(named, title=profile.key.device), nodes, devices_per_node, **own | links)


def _size(setting: Setting) -> tuple[int, int]:
    return setting.tensor, setting.micro_batch


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"


def _by_size(profiles: Sequence[Profile]) -> dict[tuple[int, int], Profile]:
    """Return the profiles by tensor ranks and rows. Raise PlannerError where they do not belong together."""
    if not profiles:
        raise PlannerError("no profile: give at least one")
    by_size: dict[tuple[int, int], Profile] = {}
    for profile in profiles:
        key, first = profile.key, profiles[0].key
        # otherwise the search would compare profiles of other machines or lengths like strategies
        for name in _SAME:
            if getattr(key, name) != getattr(first, name):
                raise PlannerError(
                    f"profiles of different {name}: {getattr(first, name)} and {getattr(key, name)}; measure all alike"
                )
        if key.activation_checkpointing:
            raise PlannerError(
                "a profile was measured with activation checkpointing, which strategies choose themselves: measure "
                "with activation_checkpoint_interval = 0"
            )
        if by_size.setdefault((key.tensor_parallel, key.micro_batch), profile) is not profile:
            raise PlannerError(
                f"two profiles have {key.tensor_parallel} tensor ranks and micro-batches of {key.micro_batch}: give one"
            )
    return by_size


def _check_models(
    profiles: Mapping[tuple[int, int], Profile], layers: Mapping[tuple[int, int], Sequence[Layer]]
) -> None:
    """Raise PlannerError for profiles of different models.

    With equal numbers of tensor ranks they have the same layers. With t times as many ranks, a layer has at most as
    many parameters on a rank, and at least a t-th of them.
    """
    for one, other in itertools.combinations(sorted(layers), 2):
        keys = profiles[one].key, profiles[other].key
        fewer, more = ([layer.parameters for layer in layers[size]] for size in (one, other))
        times = other[0] / one[0]
        is_same = len(fewer) == len(more) and all(b <= a <= times * b for a, b in zip(fewer, more, strict=True))
        if one[0] == other[0]:
            is_same &= keys[0].layers_fingerprint == keys[1].layers_fingerprint
        if not is_same:
            raise PlannerError(
                f"profiles of different models: {keys[0].model} with {one[0]} tensor ranks, and {keys[1].model} with "
                f"{other[0]}; give profiles of one model"
            )
