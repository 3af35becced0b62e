"""What every use of megatron-core's data modules starts with: is it there, and does it import quietly?"""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Iterator

from terapipe_ds import compat


class MegatronDataError(ValueError):
    """Data that megatron-core's datasets cannot be built from, or a use of them that would be wrong."""


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Around imports of megatron-core: its remarks on Transformer Engine and apex say nothing to who reads data.

    Raises:
        MegatronDataError: megatron-core is not installed.
    """
    if not compat.has_megatron():
        raise MegatronDataError("megatron-core is not installed: pip install 'terapipe_ds[megatron]'")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
        yield


def require_helpers() -> None:
    """Make sure of the compiled functions that build sample indices. They come with the wheel; nothing is compiled.

    Raises:
        MegatronDataError: megatron-core is not installed, or without them.
    """
    with quiet_imports():
        try:
            importlib.import_module("megatron.core.datasets.helpers_cpp")
        except ImportError as error:
            tested = compat.TESTED_VERSIONS["megatron-core"]
            raise MegatronDataError(
                f"megatron-core's compiled data helpers cannot be imported ({error}): install a wheel that has them, "
                f"pip install --force-reinstall --no-deps megatron-core=={tested}"
            ) from error
