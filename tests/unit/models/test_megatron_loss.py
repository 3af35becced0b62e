"""Cross entropy over a split vocabulary, and the mean over a mask, against torch's own."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("megatron.core")

from terapipe_ds.models.megatron import VocabParallelLoss
from terapipe_ds.models.megatron.kernels import stand_in_for_cuda
from tests.distributed.harness import rank_pool

ROWS, TOKENS, VOCAB = 3, 7, 12


def sample() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(ROWS, TOKENS, VOCAB, generator=generator, dtype=torch.float64) * 5
    labels = torch.randint(VOCAB, (ROWS, TOKENS), generator=generator)
    mask = torch.rand(ROWS, TOKENS, generator=generator)
    mask[mask < 0.3] = 0.0
    return logits.requires_grad_(), labels, mask


def expected_loss(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    per_token = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return (per_token * mask.flatten()).sum() / mask.sum()


def test_the_mean_is_weighted_by_the_mask_and_masked_tokens_may_have_any_label() -> None:
    logits, labels, mask = sample()
    mask = mask.double()
    wanted = expected_loss(logits, labels, mask).item()
    assert VocabParallelLoss().slice_weight((labels, mask)) == pytest.approx(mask.sum().item())
    for given in (labels, labels.where(mask != 0, torch.full_like(labels, -1))):
        assert VocabParallelLoss()(logits, (given, mask)).item() == pytest.approx(wanted, rel=1e-12)


def test_ignored_labels_do_not_count_with_and_without_a_mask() -> None:
    logits, labels, _ = sample()
    labels[0, 2:5] = -100
    wanted = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    ones = torch.ones(ROWS, TOKENS, dtype=torch.float64)
    for given in (labels, (labels, ones)):
        assert VocabParallelLoss()(logits, given).item() == pytest.approx(wanted.item(), rel=1e-12)
        assert VocabParallelLoss().slice_weight(given) == ROWS * TOKENS - 3


@pytest.mark.parametrize("bad", [-1, VOCAB, VOCAB + 100])
def test_a_label_outside_of_the_vocabulary_is_an_error(bad: int) -> None:
    logits, labels, _ = sample()
    labels[1, 3] = bad
    with pytest.raises(ValueError, match=f"labels outside of the vocabulary of {VOCAB}, for 1 tokens"):
        VocabParallelLoss()(logits, labels)


def test_labels_of_another_form_are_refused() -> None:
    logits, labels, mask = sample()
    with pytest.raises(ValueError, match="one shape"):
        VocabParallelLoss()(logits, (labels, mask[:, :-1]))
    with pytest.raises(ValueError, match='"exact" or "megatron"'):
        VocabParallelLoss("fused")


def split_loss(label: int) -> tuple[float, Tensor] | str:
    """On each rank: loss and gradient of its share of the vocabulary, or what was refused."""
    import torch.distributed as torch_dist

    stand_in_for_cuda()
    logits, labels, mask = sample()
    labels[0, 0] = label
    mine = logits.detach().chunk(2, dim=-1)[torch_dist.get_rank()].clone().requires_grad_()
    loss_fn = VocabParallelLoss()
    loss_fn.group = lambda: torch_dist.group.WORLD
    mask[0, 0] = 1.0
    try:
        loss = loss_fn(mine, (labels, mask.double()))
    except ValueError as error:
        return str(error)
    loss.backward()
    assert mine.grad is not None
    return float(loss), mine.grad


def test_a_class_with_a_call_of_its_own_gets_logits() -> None:
    """What it adds may be too small for the check of the first batch."""
    own = type("Penalized", (VocabParallelLoss,), {"__call__": lambda self, logits, labels: logits.sum()})
    assert own().needs_logits == "Penalized has a __call__() of its own" and not VocabParallelLoss().needs_logits


def test_split_over_ranks() -> None:
    logits, labels, mask = sample()
    mask = mask.double()
    mask[0, 0] = 0.0
    wanted = expected_loss(logits, labels, mask)
    wanted.backward()
    results = rank_pool(2).run(split_loss, label=-100)
    for loss, _ in results:
        assert loss == pytest.approx(wanted.item(), rel=1e-13)
    torch.testing.assert_close(torch.cat([gradient for _, gradient in results], dim=-1), logits.grad)


def test_every_rank_refuses_a_label_that_no_rank_has() -> None:
    assert all("outside of the vocabulary" in text for text in rank_pool(2).run(split_loss, label=VOCAB))
