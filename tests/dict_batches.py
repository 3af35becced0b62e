"""Dict batches in the form of Hugging Face's collators, which the tests do not install.

What must not count is filled with tokens that training would see, if it counted.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

IGNORE_INDEX = -100
PADDING = 2  # tokens at the end of the first row, in these forms
PADDED = ("plain", "position_ids")
FORMS = (*PADDED, "cu_seq_lens_q", "seq_idx", "flattened")  # `plain` rows are one document, `flattened` is one row


def ignore_ends(form: str, labels: Tensor, position_ids: Tensor) -> None:
    """Give no (shifted) label to the last tokens of documents, and to those whose next one is padding."""
    ends = torch.ones_like(labels, dtype=torch.bool)
    ends[:, :-1] = position_ids[:, 1:] == 0
    if form in PADDED:
        ends[0, -1 - PADDING :] = True
    labels[ends] = IGNORE_INDEX
    if bool((labels == IGNORE_INDEX).all()):  # at least one counts
        row, token = (~ends).nonzero()[0]
        labels[row, token] = 0


def of(form: str, tokens: Tensor, position_ids: Tensor, labels: Tensor) -> dict[str, Any]:
    """Return rows of tokens, with the shifted labels of `ignore_ends`, as a dict of one of the forms."""
    unshifted = torch.cat([tokens[:, :1], labels[:, :-1]], dim=1)
    begins = position_ids == 0
    unshifted[begins] = tokens[begins]
    batch = {"input_ids": tokens, "labels": unshifted}
    if form in PADDED:
        mask = torch.ones_like(tokens)
        mask[0, -PADDING:] = 0
        batch |= {"attention_mask": mask, "labels": torch.where(mask == 1, unshifted, tokens)}
    if form == "position_ids":
        batch["position_ids"] = torch.where(mask == 1, position_ids, 1)
    elif form == "cu_seq_lens_q":
        batch[form] = torch.cat([begins.flatten().nonzero().flatten(), torch.tensor([tokens.numel()])]).int()
    elif form == "seq_idx":
        batch = {"input_ids": tokens, "shift_labels": labels, form: begins.cumsum(1).int()}
    elif form == "flattened":
        starts = begins[0].nonzero().flatten().tolist()[1:]
        parts = zip(tokens[0].tensor_split(starts), unshifted[0].tensor_split(starts), strict=True)
        batch = flattened([{"input_ids": one.tolist(), "labels": its.tolist()} for one, its in parts])
    return batch


def flattened(samples: Sequence[Mapping[str, list[int]]]) -> dict[str, Any]:
    """What `DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)` makes of samples.

    One row of all tokens in int64, whose documents begin with an ignored label; edges and numbers of documents in
    int32, edges without a dimension for rows; the longest document as Python ints.
    """
    lengths = [len(sample["input_ids"]) for sample in samples]
    labels = [[IGNORE_INDEX, *sample.get("labels", sample["input_ids"])[1:]] for sample in samples]
    edges = torch.tensor([0, *lengths]).cumsum(0).int()
    return {
        "input_ids": torch.tensor([[token for sample in samples for token in sample["input_ids"]]]),
        "labels": torch.tensor([[label for document in labels for label in document]]),
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "seq_idx": torch.arange(len(samples)).repeat_interleave(torch.tensor(lengths))[None].int(),
        "cu_seq_lens_q": edges,
        "cu_seq_lens_k": edges,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }
