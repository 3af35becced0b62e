"""Turn a dict batch, as Hugging Face's collators make it, into inputs, shifted labels, and where documents start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from terapipe_ds.attention.document_edges import Starts, have_edges, starts_at
from terapipe_ds.config import TeraPipeConfig
from terapipe_ds.messages import show_key, show_value

_POSITION_IDS = "position_ids"
_CUMULATIVE = ("cu_seq_lens_q", "cu_seq_lens_k")
_LONGEST = ("max_length_q", "max_length_k")
_BY_TOKEN = ("input_ids", "labels", "shift_labels", "attention_mask", "seq_idx")  # in addition to the position ids
_OTHERS = (*_BY_TOKEN, *_CUMULATIVE, *_LONGEST)


_FIXES = {
    "token_type_ids": "call the tokenizer with return_token_type_ids=False",
    "num_items_in_batch": "leave it out. The loss is a mean over the labels of each micro-batch",
}


class BatchError(ValueError):
    """Refuse a batch that cannot be cut into token slices."""


class ReadBatch(NamedTuple):
    """Hold a micro-batch in one form for later code. Labels of a dict are None, or one tensor of shifted labels."""

    inputs: Any
    labels: Any
    starts: Starts | None


def read_dict(batch: Mapping[Any, Any], config: TeraPipeConfig) -> ReadBatch:
    """Return `input_ids`, or `(input_ids, position_ids)` where there are any, with shifted labels and the documents.

    `labels` are shifted: token t is trained on `labels[t + 1]`, and the last token of a row or document on none.
    `shift_labels` replace them unchanged. Labels of right padding are ignored.

    Raises BatchError, which names the entry.
    """
    position_ids = _name_of_position_ids(config)
    given = {key: value for key, value in batch.items() if value is not None}
    _check_entries(given, position_ids)
    tokens = given["input_ids"]
    lengths = _lengths(given.get("attention_mask"), tokens)
    starts = _starts(given, position_ids, config.documents == "off", lengths)
    labels = given.get("shift_labels")
    if labels is not None:
        labels = _without_padding(labels, lengths, config.ignore_index)
    elif "labels" in given:
        labels = _shifted(_without_padding(given["labels"], lengths, config.ignore_index), starts, config.ignore_index)
    inputs = (tokens, _counted_on(given[position_ids], lengths)) if position_ids in given else tokens
    return ReadBatch(inputs, labels, starts if have_edges(starts) else None)


def _refuse(key: Any, value: Any, problem: str) -> NoReturn:
    dtype = str(value.dtype).removeprefix("torch.") if torch.is_tensor(value) else ""
    kind = f"{dtype} {list(value.shape)}" if dtype else show_value(value)
    raise BatchError(f"the entry {show_key(key)} of a dict batch ({kind}): {problem}")


def _name_of_position_ids(config: TeraPipeConfig) -> str:
    """Return the entry that holds the position ids; refuse config keys that are meant for tuples."""
    documents = config.documents
    if config.sliced_inputs is not None:
        raise BatchError(
            f"terapipe.sliced_inputs = {list(config.sliced_inputs)} are indices of a tuple of inputs, and the batch is "
            "a dict, whose entries are known: remove the key"
        )
    if config.sequence_dim != 1:
        raise BatchError(
            f"terapipe.sequence_dim = {config.sequence_dim}, but the entries of a dict batch are [rows, tokens]: "
            "remove the key"
        )
    if isinstance(documents, int):
        raise BatchError(
            f"terapipe.documents = {documents} is an index of a tuple of inputs, and the batch is a dict: give the "
            f'name of its position ids, "{_POSITION_IDS}"'
        )
    if documents in _OTHERS:
        raise BatchError(
            f'terapipe.documents = "{documents}" must name the position ids: give "{_POSITION_IDS}"; cu_seq_lens_q '
            "and seq_idx are read with it"
        )
    return _POSITION_IDS if documents == "off" else documents


def _is_integer(value: Any) -> bool:
    if not torch.is_tensor(value) or value.dtype == torch.bool:
        return False
    return not (value.is_floating_point() or value.is_complex())


def _check_entries(given: Mapping[Any, Any], position_ids: str) -> None:
    """Refuse entries that nothing reads, and entries that are not integers of the shape of `input_ids`."""
    known = (position_ids, *_OTHERS)
    for key, value in given.items():
        if key not in known:
            fix = f"leave it out in the collate_fn (entries are {', '.join(known)}), or give tuples"
            _refuse(key, value, f"nothing reads it: {_FIXES.get(key, fix)}")
    if "input_ids" not in given:
        raise BatchError(f"a dict batch needs input_ids, and has {', '.join(map(show_key, given)) or 'no entry'}")
    shape = getattr(given["input_ids"], "shape", ())
    for key in (*_BY_TOKEN, position_ids):
        value = given.get(key)
        if value is None:
            continue
        is_integer = _is_integer(value) or (key == "attention_mask" and getattr(value, "dtype", None) == torch.bool)
        if not is_integer or value.dim() != 2 or value.numel() == 0:
            _refuse(key, value, "give a tensor of integers [rows, tokens]")
        if value.shape != shape:
            _refuse(key, value, f"it must have the shape of input_ids, {list(shape)}")


def _lengths(mask: torch.Tensor | None, tokens: torch.Tensor) -> list[int]:
    """Return for each row the number of tokens before its padding."""
    if mask is None:
        return [tokens.size(1)] * len(tokens)
    counts = mask.to("cpu", torch.int64)
    if not bool(((counts == 0) | (counts == 1)).all()):
        _refuse("attention_mask", mask, "give 1 for each token and 0 for padding; documents are told by position_ids")
    for row, token in (counts[:, 1:] > counts[:, :-1]).nonzero().tolist():
        problem = f"row {row} has padding before token {token + 1}, and tokens would attend to it"
        _refuse("attention_mask", mask, f'{problem}: pad at the end of rows, with tokenizer.padding_side = "right"')
    return [int(length) for length in counts.sum(1)]


def _without_padding(labels: torch.Tensor, lengths: Sequence[int], ignore_index: int) -> torch.Tensor:
    labels = labels.to(torch.int64)
    if min(lengths) == labels.size(1):
        return labels
    is_padding = torch.arange(labels.size(1), device="cpu") >= torch.tensor(lengths, device="cpu")[:, None]
    return labels.masked_fill(is_padding.to(labels.device), ignore_index)


def _counted_on(position_ids: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Return position ids that go on through padding, where collators give any number."""
    if min(lengths) == position_ids.size(1):
        return position_ids
    last = torch.tensor(lengths, device=position_ids.device)[:, None] - 1
    places = torch.arange(position_ids.size(1), device=position_ids.device)
    of_last = position_ids.long().gather(1, last.clamp_min(0)).masked_fill(last < 0, -1)
    return torch.where(places > last, of_last + places - last, position_ids).to(position_ids.dtype)


def _shifted(labels: torch.Tensor, starts: Starts, ignore_index: int) -> torch.Tensor:
    """Return for each token the label of the next one, and none for the last of a document."""
    shifted = labels.new_full(labels.shape, ignore_index)
    shifted[:, :-1] = labels[:, 1:]
    for row, begins in zip(shifted, starts, strict=True):
        row[[start - 1 for start in begins[1:]]] = ignore_index
    return shifted


def _starts(given: Mapping[Any, Any], position_ids: str, is_off: bool, lengths: Sequence[int]) -> Starts:
    """Return where documents start in each row, checked against every entry that tells; padding does not count."""
    ids, numbers = (given[key].to("cpu", torch.int64) if key in given else None for key in (position_ids, "seq_idx"))
    by_key: dict[str, torch.Tensor] = {}  # whether a document starts at a token, without the first of each row
    if ids is not None:  # ids that grow in other steps than 1 do not yet mean that rows are packed
        by_key[position_ids] = ids[:, 1:] <= ids[:, :-1] if is_off else ids[:, 1:] != ids[:, :-1] + 1
    if (flat := _cumulative(given)) is not None:
        by_key[_CUMULATIVE[0]] = flat.view(given["input_ids"].shape)[:, 1:]
    if numbers is not None:
        by_key["seq_idx"] = numbers[:, 1:] != numbers[:, :-1]
    is_token = torch.arange(1, given["input_ids"].size(1), device="cpu") < torch.tensor(lengths, device="cpu")[:, None]
    by_key = {key: begins & is_token for key, begins in by_key.items()}
    if is_off:
        _refuse_packed(given, by_key)
        return ((0,),) * len(lengths)
    if not by_key:
        raise BatchError(
            f'terapipe.documents = "{position_ids}", but the dict batch says nowhere where documents start: give '
            f"{position_ids}, cu_seq_lens_q or seq_idx in each batch"
        )
    (first, begins), *others = by_key.items()
    for other, by_other in others:
        for row, token in (begins != by_other).nonzero().tolist():
            says, does_not = (first, other) if begins[row, token] else (other, first)
            raise BatchError(
                f"the entries {first} and {other} of a dict batch differ in where documents start: first at token "
                f"{token + 1} of row {row}, where one starts by {says} and none by {does_not}. Make both of the same "
                "documents, or leave one out"
            )
    return starts_at(begins)


def _cumulative(given: Mapping[Any, Any]) -> torch.Tensor | None:
    """Return for each token of the flattened rows whether a document starts there by `cu_seq_lens_q`."""
    name, value, (rows, length) = _CUMULATIVE[0], given.get(_CUMULATIVE[0]), given["input_ids"].shape
    if value is None:
        for key in (_CUMULATIVE[1], *_LONGEST):
            if key in given:
                _refuse(key, given[key], f"it goes with {name}, which the batch lacks: give both, or leave it out")
        return None
    edges = _edges(name, value)
    if int(edges[0]) != 0 or int(edges.diff().min()) < 0 or int(edges[-1]) != rows * length:
        _refuse(name, value, f"give ascending edges of documents, from 0 to {rows * length}: rows times tokens")
    other = given.get(_CUMULATIVE[1])
    if other is not None and not torch.equal(_edges(_CUMULATIVE[1], other), edges):
        _refuse(_CUMULATIVE[1], other, f"it must equal {name}, for queries and keys are the same tokens")
    longest = int(edges.diff().max())
    for key in _LONGEST:  # an upper bound for kernels, which may be loose
        if key in given and not _is_at_least(given[key], longest):
            _refuse(key, given[key], f"the longest document of {name} has {longest} tokens: give that, or leave it out")
    begins = torch.zeros(rows * length + 1, dtype=torch.bool, device="cpu")
    begins[edges] = True  # an empty document has one edge twice and does not count
    for row in (~begins[: rows * length : length]).nonzero().flatten().tolist():
        problem = f"no document starts at {row * length}, where row {row} does"
        _refuse(name, value, f"{problem}, and a document cannot go on in another row: give an edge there")
    return begins[:-1]


def _edges(key: str, value: Any) -> torch.Tensor:
    """Return cumulative lengths as int64 [n + 1] on the CPU; they may come with a leading dimension of 1."""
    if not _is_integer(value) or value.shape[:-1] not in ((), (1,)) or value.numel() < 2:
        _refuse(key, value, "give a tensor of integers [documents + 1], over the flattened rows")
    edges: torch.Tensor = value.detach().to("cpu", torch.int64).flatten()
    return edges


def _is_at_least(value: Any, longest: int) -> bool:
    try:
        return int(value) >= longest
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return False


def _refuse_packed(given: Mapping[Any, Any], by_key: Mapping[str, torch.Tensor]) -> None:
    for key, begins in by_key.items():
        for row, token in begins.nonzero().tolist():
            _refuse(
                key,
                given[key],
                f"a document starts at token {token + 1} of row {row}, and attention would mix it with those "
                f'before it: set terapipe.documents to "{_POSITION_IDS}". Where tokens are to see the documents '
                "before theirs, leave the entry out, or give tuples",
            )
