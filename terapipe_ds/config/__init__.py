"""Read the `terapipe` section of a DeepSpeed config."""

from __future__ import annotations

from terapipe_ds.config.section import TeraPipeConfig as TeraPipeConfig
from terapipe_ds.config.values import TeraPipeConfigError as TeraPipeConfigError
