"""Define tiny models whose layers hand tuples on, return their own loss, or report further losses. All use fp64."""

from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import Tensor, nn

from terapipe_ds.models import gpt
from tests.distributed.engines import LENGTH, MicroBatch, micro_batch
from tests.small_models import parts
from tests.small_models.parts import IGNORE_INDEX, VOCAB_SIZE, WIDTH, weight


def unpacked(inputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return a tuple again: DeepSpeed takes a tuple of one tensor apart when it checkpoints activations."""
    return inputs if isinstance(inputs, tuple) else (inputs,)


class Embedding(parts.Embedding):
    """(tokens, *passengers) -> (hidden, *passengers)."""

    def forward(self, inputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:  # type: ignore[override]
        tokens, *passengers = unpacked(inputs)
        return super().forward(tokens), *passengers


class Head(parts.Head):
    """(hidden, *passengers) -> logits."""

    def forward(self, inputs: Tensor | tuple[Tensor, ...]) -> Any:
        return super().forward(unpacked(inputs)[0])


class DecoderInside(nn.Module):
    """A decoder layer, and an MLP that works in place."""

    def __init__(self, index: int) -> None:
        super().__init__()
        sizes = {"hidden_size": WIDTH, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "ffn_size": 24}
        config = gpt.GPTConfig(**sizes, bias=True, init_std=0.3, dtype="float64")
        self.decoder = nn.Sequential(gpt.DecoderLayer(config, index), parts.Mlp())


# -- passengers of all kinds ---------------------------------------------------------------------------------


class GuidedDecoder(DecoderInside):
    """Run a decoder layer that uses every passenger of `guided_micro_batch` and hands all of them on."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.positions = weight(LENGTH, WIDTH, seed=10 + index)

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, position_ids, mask, scale, *memory = inputs
        hidden = hidden + self.positions[position_ids] * scale
        for each in memory:
            hidden = hidden + each.mean(dim=1, keepdim=True)
        hidden = torch.where(mask.squeeze(1), hidden, hidden * 0.5)
        return self.decoder(hidden), position_ids, mask, scale, *memory


def guided_layers() -> list[LayerSpec]:
    return [LayerSpec(Embedding), LayerSpec(GuidedDecoder, 0), LayerSpec(GuidedDecoder, 1), LayerSpec(Head)]


def guided_micro_batch(seed: int, memory: bool = False) -> MicroBatch:
    """Return inputs and labels. The inputs are token ids [B, L] and position ids [B, L], both cut in slices; a boolean
    mask [B, 1, 1, hidden] and a float scale [B, 1, 1], handed whole; with `memory` also a tensor [B, L, hidden], which
    layers need whole.
    """
    tokens, labels = micro_batch(seed)
    generator = torch.Generator().manual_seed(seed)
    rows = tokens.shape[0]
    inputs = [
        tokens,
        torch.stack([torch.randperm(LENGTH, generator=generator) for _ in range(rows)]),
        torch.rand(rows, 1, 1, WIDTH, generator=generator) < 0.7,
        torch.rand(rows, 1, 1, generator=generator, dtype=torch.float64) + 0.5,
    ]
    if memory:
        inputs.append(torch.randn(rows, LENGTH, WIDTH, generator=generator, dtype=torch.float64))
    return tuple(inputs), labels


class TrainedScale(nn.Module):
    """Add a float that needs a gradient; only the layer after the next one may use it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = weight(1, 1, WIDTH, seed=5)

    def forward(self, inputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        [hidden] = unpacked(inputs)
        return hidden, self.scale.expand(hidden.shape[0], -1, -1)


class ScaledDecoder(DecoderInside):
    """Use the scale, or only hand it on."""

    def __init__(self, index: int, use: bool) -> None:
        super().__init__(index)
        self.use = use

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, scale = inputs
        return self.decoder(hidden * scale if self.use else hidden), scale


def scaled_layers() -> list[LayerSpec]:
    """Return layers whose scale crosses between two stages; the last stage leaves it unused."""
    decoders = [LayerSpec(ScaledDecoder, index, index == 0) for index in range(3)]
    return [LayerSpec(Embedding), LayerSpec(TrainedScale), *decoders, LayerSpec(Head)]


class FlatHead(Head):
    """hidden -> logits [B * T, vocab], rows and tokens in one dimension."""

    def forward(self, inputs: Tensor | tuple[Tensor, ...]) -> Tensor:
        return super().forward(inputs).flatten(0, 1)


def flat_layers() -> list[LayerSpec]:
    return [LayerSpec(Embedding), LayerSpec(PassingDecoder, 0), LayerSpec(PassingDecoder, 1), LayerSpec(FlatHead)]


def flat_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels.flatten())


# -- frozen parameters ---------------------------------------------------------------------------------------


class Frozen(nn.Module):
    """A layer that is not trained."""

    def __init__(self, layer: LayerSpec) -> None:
        super().__init__()
        self.layer = layer.build().requires_grad_(False)

    def forward(self, inputs: Any) -> Any:
        return self.layer(inputs)


class Idle(nn.Module):
    """Have a parameter that nothing depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = weight(3, seed=6)

    def forward(self, inputs: Any) -> Any:
        return inputs


def frozen_layers(kind: str) -> list[LayerSpec]:
    """Return layers whose stages hand on a tuple where only the scale needs a gradient, or nothing that needs one."""
    embedding = LayerSpec(Frozen, LayerSpec(Embedding))
    if kind == "all but the scale":
        return [embedding, LayerSpec(TrainedScale), LayerSpec(ScaledDecoder, 0, True), LayerSpec(Head)]
    assert kind == "whole stage"
    return [embedding, LayerSpec(Idle), LayerSpec(PassingDecoder, 0), LayerSpec(Head)]


class Doubling(nn.Module):
    """hidden -> the same tensor twice, and once without its graph."""

    def forward(self, inputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        [hidden] = unpacked(inputs)
        return hidden, hidden, hidden.detach()


class Merging(nn.Module):
    def forward(self, inputs: tuple[Tensor, ...]) -> Tensor:
        return inputs[0] * 0.5 + inputs[1].square() + inputs[2]


def doubling_layers() -> list[LayerSpec]:
    """Return layers in which the output of `Doubling` crosses between two stages."""
    return [
        LayerSpec(Embedding),
        LayerSpec(PassingDecoder, 0),
        LayerSpec(Doubling),
        LayerSpec(Merging),
        LayerSpec(PassingDecoder, 1),
        LayerSpec(Head),
    ]


class SummingEmbedding(Embedding):
    """tokens -> (hidden, a number that every layer adds to): how auxiliary losses travel."""

    def forward(self, inputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        [hidden] = super().forward(inputs)
        return hidden, hidden.square().mean()


class SummingDecoder(DecoderInside):
    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden = self.decoder(inputs[0])
        return hidden, inputs[1] + hidden.square().mean()


class SummingHead(Head):
    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:  # type: ignore[override]
        return super().forward(inputs), inputs[1]


def summing_layers() -> list[LayerSpec]:
    return [
        LayerSpec(SummingEmbedding),
        LayerSpec(SummingDecoder, 0),
        LayerSpec(SummingDecoder, 1),
        LayerSpec(SummingHead),
    ]


def summed_loss(outputs: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    """Return the mean over all tokens, of both losses."""
    return F.cross_entropy(outputs[0].flatten(0, 1), labels.flatten()) + 0.1 * outputs[1]


# -- losses --------------------------------------------------------------------------------------------------


class LossHead(Head):
    """(hidden, labels) -> the mean loss over all tokens: the model needs no loss_fn."""

    def forward(self, inputs: tuple[Tensor, ...]) -> Tensor:
        logits = super().forward(inputs)
        return F.cross_entropy(logits.flatten(0, 1), inputs[1].flatten())


class PassingDecoder(DecoderInside):
    """Run a decoder layer that hands on the passengers, if there are any."""

    def forward(self, inputs: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        hidden, *passengers = unpacked(inputs)
        return (self.decoder(hidden), *passengers) if passengers else self.decoder(hidden)


def own_loss_layers() -> list[LayerSpec]:
    return [LayerSpec(Embedding), LayerSpec(PassingDecoder, 0), LayerSpec(PassingDecoder, 1), LayerSpec(LossHead)]


def own_loss_micro_batch(seed: int) -> MicroBatch:
    tokens, labels = micro_batch(seed, masked=False)
    return (tokens, labels), labels


def weighted_micro_batch(seed: int) -> MicroBatch:
    tokens, labels = micro_batch(seed, masked=False)
    weights = torch.rand(labels.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    weights[:, :6] = 0.0  # a slice without any weight
    weights[0] *= 10.0
    return tokens, (labels, weights)


class WeightedRows:
    """Compute cross entropy with labels `(row weights [B], targets [B, L])`: the first tensor has no sequence."""

    def __call__(self, logits: Tensor, labels: tuple[Tensor, Tensor]) -> Tensor:
        row_weights, targets = labels
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
        return (losses * row_weights[:, None]).sum() / (row_weights.sum() * targets.size(1))


def weighted_rows_micro_batch(seed: int) -> MicroBatch:
    tokens, labels = micro_batch(seed, masked=False)
    return tokens, (torch.tensor([0.25, 3.0], dtype=torch.float64), labels)


def viewing_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute the loss with `view`, as many write it: `view` only takes contiguous tensors."""
    return F.cross_entropy(logits.view(-1, VOCAB_SIZE), labels.view(-1))


def patient_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return zero if no label counts; torch's mean is NaN then."""
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return total / (labels != IGNORE_INDEX).sum().clamp_min(1)


class ReportingModule(PipelineModule):
    """Add a second loss to the first and report both, as models with auxiliary losses do."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        nothing_yet = torch.tensor(float("nan"))
        self.reported = dict.fromkeys(("language", "size"), nothing_yet)
        self.loss_fn = self.loss

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        valid = labels != IGNORE_INDEX
        language = gpt.gpt_loss(logits, labels)
        size = logits[valid].logsumexp(-1).square().mean()
        self.reported = {"language": language.detach(), "size": size.detach()}
        return language + 0.1 * size

    def get_additional_losses(self) -> dict[str, Tensor]:
        return self.reported


class Faulty(nn.Module):
    """Raise in one of its forwards: set `countdown`."""

    countdown = 0

    def forward(self, inputs: Any) -> Any:
        Faulty.countdown -= 1
        if Faulty.countdown == 0:
            raise MemoryError("out of memory")
        return inputs


# -- another layout ------------------------------------------------------------------------------------------


class Transposed(nn.Module):
    """Run a layer of [B, T, ...] on [T, B, ...]."""

    def __init__(self, layer: LayerSpec) -> None:
        super().__init__()
        self.layer = layer.build()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs.transpose(0, 1)).transpose(0, 1)
