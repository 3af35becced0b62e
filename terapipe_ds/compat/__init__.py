"""Describe the third-party packages: tested versions, optional packages, overridden names."""

from terapipe_ds.compat.hooks import require_hooks as require_hooks
from terapipe_ds.compat.hooks import require_megatron as require_megatron
from terapipe_ds.compat.hooks import require_transformers as require_transformers
from terapipe_ds.compat.hooks import require_trl as require_trl
from terapipe_ds.compat.versions import TESTED_VERSIONS as TESTED_VERSIONS
from terapipe_ds.compat.versions import CompatError as CompatError
from terapipe_ds.compat.versions import MissingExtraError as MissingExtraError
from terapipe_ds.compat.versions import cache_arguments as cache_arguments
from terapipe_ds.compat.versions import has as has
from terapipe_ds.compat.versions import has_megatron as has_megatron
from terapipe_ds.compat.versions import installed_versions as installed_versions
from terapipe_ds.compat.versions import warn_about_versions as warn_about_versions
from terapipe_ds.compat.versions import with_defaults as with_defaults
