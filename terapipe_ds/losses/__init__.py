"""Losses that keep no logits: a slice keeps the hidden states before its output matrix, and nothing per vocabulary."""

from terapipe_ds.losses.head import Head, VocabularyRanks, find_head, hand_on, hands_on_hidden, head_of, tied_logits
from terapipe_ds.losses.linear_cross_entropy import LinearCrossEntropy

__all__ = [
    "Head",
    "LinearCrossEntropy",
    "VocabularyRanks",
    "find_head",
    "hand_on",
    "hands_on_hidden",
    "head_of",
    "tied_logits",
]
