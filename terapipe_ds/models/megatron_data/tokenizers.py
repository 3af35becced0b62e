"""Tokenizers of datasets: bytes, or what megatron-core's tokenizer library reads.

A dataset asks of its tokenizer ``vocab_size``, ``eod`` (the token that ends a document) and ``unique_identifiers`` (for
the name of its index cache); making a dataset asks for ``tokenize``.
"""

from __future__ import annotations

import difflib
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from terapipe_ds import compat
from terapipe_ds.models.megatron_data.needs import quiet_imports

KINDS = {
    "bytes": "a token is one byte; 256 and the end of a document are the whole vocabulary",
    "huggingface:NAME_OR_FOLDER": "a tokenizer of transformers",
    "sentencepiece:FILE": "a .model file",
    "tiktoken:FILE": "a .json file of tiktoken ranks",
    "null:N": "text that is token ids below N already, between blanks; N ends a document",
}
"""What :func:`build_tokenizer` takes, in words."""

_PACKAGES = {"huggingface": "transformers", "sentencepiece": "sentencepiece", "tiktoken": "tiktoken"}


class TokenizerError(ValueError):
    """There is no such tokenizer, or it cannot be loaded here."""


class Tokenizer(Protocol):
    """What is used of a tokenizer; Megatron's ``MegatronTokenizerText`` has it as well."""

    @property
    def vocab_size(self) -> int:
        """Tokens are below this number."""

    @property
    def eod(self) -> int:
        """The token that ends a document."""

    @property
    def unique_identifiers(self) -> OrderedDict[str, Any]:
        """What tells this tokenizer from others; becomes part of the name of an index cache."""

    def tokenize(self, text: str) -> Iterable[int]:
        """The tokens of ``text``, without an end of document."""


class ByteTokenizer:
    """A token is a byte of the UTF-8 text, and 256 ends a document: 257 tokens.

    megatron-core's own byte tokenizer takes byte 0 for the end of a document and byte 1 for padding; here no byte has a
    second meaning, and there is no padding token, so that ``GPTDataset`` masks what it pads and nothing else.
    """

    vocab_size = 257
    eod = 256

    @property
    def unique_identifiers(self) -> OrderedDict[str, Any]:
        """For the name of an index cache."""
        return OrderedDict({"class": f"{type(self).__module__}.{type(self).__qualname__}"})

    def tokenize(self, text: str | bytes) -> bytes:
        """The bytes themselves: iterating over them gives ints, and numpy reads them without a copy."""
        return text if isinstance(text, bytes) else text.encode()

    def detokenize(self, tokens: Iterable[int]) -> str:
        """The text of ``tokens``, ends of documents left out; what is not UTF-8 shows as U+FFFD."""
        return bytes(token for token in map(int, tokens) if token != self.eod).decode(errors="replace")


def build_tokenizer(name: str = "bytes") -> Tokenizer:
    """The tokenizer of that name: see :data:`KINDS`.

    Raises:
        TokenizerError: another name, a package is missing, or the tokenizer cannot be loaded.
    """
    kind, _, place = name.partition(":")
    if name == "bytes":
        return ByteTokenizer()
    if kind == "null":
        return _null(name, place)
    if kind not in _PACKAGES or not place:
        raise TokenizerError(f"tokenizer {name!r}: {_hint(kind)}give one of {', '.join(KINDS)}")
    package = _PACKAGES[kind]
    if not compat.is_installed(package):
        raise TokenizerError(f"tokenizer {name!r} needs {package}: pip install {package}")
    return _megatron(name, lambda build: build(tokenizer_path=place, metadata_path={"library": kind}))


def _hint(kind: str) -> str:
    near = difflib.get_close_matches(kind, [k.partition(":")[0] for k in KINDS], n=1)
    return f"did you mean {next(k for k in KINDS if k.startswith(near[0]))}? " if near else ""


def _null(name: str, size: str) -> Tokenizer:
    if not size.isdecimal() or int(size) < 1:
        raise TokenizerError(f"tokenizer {name!r}: give the number of token ids, as in null:50257")
    return _megatron(name, lambda build: build(metadata_path={"library": "null"}, vocab_size=int(size)))


def _megatron(name: str, build: Callable[[Callable[..., Any]], Any]) -> Tokenizer:
    """A tokenizer of megatron-core's library, which raises whatever it likes."""
    with quiet_imports():
        from megatron.core.tokenizers import MegatronTokenizer
    try:
        tokenizer = build(MegatronTokenizer.from_pretrained)
        eod = tokenizer.eod
    except Exception as error:
        raise TokenizerError(f"tokenizer {name!r} cannot be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(eod, int) or eod < 0:
        raise TokenizerError(
            f"tokenizer {name!r} has no token that ends a document (eod is {eod!r}): give one that has an end-of-text "
            "token"
        )
    return tokenizer
