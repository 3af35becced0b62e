"""Relate the time of a step to a device's peak: model FLOP/s, MFU and tokens per second, beside published runs.

Model FLOPs count one forward and its backward, which is three forwards: 2 per parameter of a matrix and token, and 2
for each product in attention. A causal mask leaves half of these products. Recomputation does not count.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from terapipe_ds.costs.devices import DeviceCard
from terapipe_ds.costs.model_sizes import ModelSize

_HOPPER = (0.38, 0.43, "Llama 3 405B, arXiv 2407.21783, table 4")
_AMPERE = (0.41, 0.56, "22B to 1T, arXiv 2205.05198, table 5")
_PUBLISHED = {"h100": _HOPPER, "h200": _HOPPER, "h800": _HOPPER, "a100": _AMPERE}
"""The least and the largest MFU of large dense models on a device, and who reports them."""


@dataclass(frozen=True)
class Utilisation:
    """Hold figures of one device."""

    tokens_per_s_per_device: float
    model_flops_per_s: float
    mfu: float  # of the dense peak in the dtype of the products

    @classmethod
    def of(
        cls, size: ModelSize, card: DeviceCard, dtype: str, step: tuple[int, int], seconds: float, devices: int
    ) -> Utilisation:
        """Return the figures of a step of (sequences, tokens of each) on `devices` devices."""
        peak, (sequences, length) = card.peak_flops[card.resolve_dtype(dtype)], step
        per_s = sequences / (seconds * devices) if seconds > 0 else 0.0
        flops = per_s * size.training_flops(length)
        return cls(per_s * length, flops, flops / peak if peak else 0.0)

    def lines(self, card: DeviceCard) -> list[str]:
        """Return one line with the figures, one with published ones, and a warning where these are lower."""
        rate = f"{self.model_flops_per_s / 1e12:,.4g} TFLOP/s, MFU {self.mfu:.1%}"
        lines = [f"{rate}, {self.tokens_per_s_per_device:,.0f} tokens/s per device"]
        known = next((of for name, of in _PUBLISHED.items() if card.name.startswith(name)), None)
        if known is None:
            return lines
        low, high, source = known
        lines.append(f"published: {low:.0%} to {high:.0%} ({source})")
        if self.mfu > high:
            lines.append("warning: above all published runs; expect a longer step")
        return lines

    def to_dict(self) -> dict[str, float]:
        return asdict(self)
