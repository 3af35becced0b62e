"""Packaging metadata; tools are configured in pyproject.toml."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
PLOT = ["matplotlib>=3.8,<4", "jinja2>=3.1,<4", "plotly>=6,<8"]
TRL = ["accelerate>=1.10,<2", "datasets>=4,<6", "trl>=1.16,<2"]
QLORA = ["accelerate>=1.10,<2", "bitsandbytes>=0.50,<0.51"]  # transformers asks for both
HUGGING_FACE = ["transformers>=4.57,<6", "safetensors>=0.4.3,<1", "peft>=0.17,<1"]


def read_version() -> str:
    """Return the version that the package has, without importing it."""
    text = (HERE / "terapipe_ds" / "version.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"', text, re.MULTILINE)
    if found is None:
        raise RuntimeError("terapipe_ds/version.py has no __version__")
    return found.group(1)


def read_readme() -> str:
    """Return the long description; empty in a tree that has no README yet."""
    readme = HERE / "README.md"
    return readme.read_text(encoding="utf-8") if readme.exists() else ""


setup(
    name="terapipe_ds",
    version=read_version(),
    description="Token-level pipeline parallelism (TeraPipe) for DeepSpeed",
    long_description=read_readme(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["terapipe_ds", "terapipe_ds.*"]),
    package_data={"terapipe_ds": ["py.typed", "data/*"], "terapipe_ds.bench.report": ["page.html"]},
    install_requires=[
        "torch>=2.11",  # the oldest that is tested; a newer one than the newest tested gets a warning
        "deepspeed>=0.19.8,<0.20",  # the engine overrides undocumented names of the tested 0.19.8
        "numpy>=1.26,<3",
        "pydantic>=2.10,<3",
        "packaging>=23",
        "xxhash>=3.4,<5",  # checksums of checkpoints
    ],
    extras_require={
        "hf": [*HUGGING_FACE],
        "trl": [*HUGGING_FACE, *TRL],  # `terapipe_ds.integrations.trainer`
        "qlora": [*HUGGING_FACE, "transformers>=5", *QLORA],  # adapters beside quantized weights
        "megatron": ["megatron-core==0.16.1"],
        "plot": [*PLOT],
        "bench": [*PLOT],  # the report of `terapipe bench --html`
        "completion": ["argcomplete>=3.5"],  # of the words of `terapipe` in the shell
        "docs": [
            "build>=1.2",
            "mkdocs>=1.6,<2",
            "mkdocs-material>=9.6,<10",
            "mkdocstrings[python]>=0.30,<2",
            "ruff>=0.6",  # breaks the lines of signatures
            "twine>=6",
        ],
        "test": [
            *HUGGING_FACE,
            *TRL,
            *QLORA,
            *PLOT,
            "argcomplete>=3.5",
            "hypothesis>=6.100",
            "mypy>=1.11",
            "pytest>=9",
            "pytest-xdist>=3.6",
            "ruff>=0.6",
            "setuptools>=69",  # builds the package for a test of what the wheel holds
        ],
    },
    entry_points={"console_scripts": ["terapipe = terapipe_ds.cli:main"]},
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
