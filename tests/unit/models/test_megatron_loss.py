"""Cross entropy over a split vocabulary, and the mean over a mask, against torch's own."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as torch_dist
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("megatron.core")

from terapipe_ds.models.megatron import VocabParallelLoss
from terapipe_ds.models.megatron.loss import vocab_parallel_cross_entropy
from tests.distributed.harness import rank_pool

ROWS, TOKENS, VOCAB = 3, 7, 12


def sample(seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(ROWS, TOKENS, VOCAB, generator=generator, dtype=torch.float64) * 5
    labels = torch.randint(VOCAB, (ROWS, TOKENS), generator=generator)
    mask = torch.rand(ROWS, TOKENS, generator=generator)
    mask[mask < 0.3] = 0.0
    return logits.to(dtype).requires_grad_(), labels, mask


def expected_loss(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    per_token = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return (per_token * mask.flatten()).sum() / mask.sum()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_per_token_loss_and_gradient_of_a_whole_vocabulary(dtype: torch.dtype) -> None:
    logits, labels, _ = sample(dtype=dtype)
    weights = torch.randn(ROWS, TOKENS, generator=torch.Generator().manual_seed(1))
    losses = vocab_parallel_cross_entropy(logits, labels)
    wide = logits.detach().to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    wanted = F.cross_entropy(wide.flatten(0, 1), labels.flatten(), reduction="none").view(ROWS, TOKENS)
    (losses * weights).sum().backward()
    (wanted * weights).sum().backward()
    assert losses.dtype == wide.dtype and logits.grad is not None and logits.grad.dtype == dtype
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(losses, wanted, rtol=tolerance, atol=tolerance)
    gradient_tolerance = 1e-2 if dtype == torch.bfloat16 else tolerance  # rounded once, to 8 bits
    torch.testing.assert_close(logits.grad, wide.grad.to(dtype), rtol=gradient_tolerance, atol=gradient_tolerance)


def test_one_rank_has_nobody_to_ask() -> None:
    """Over NCCL the first collective of a group connects its ranks, behind receives that wait for this rank."""
    logits, labels, _ = sample()
    alone = SimpleNamespace(size=lambda: 1)
    with mock.patch.multiple(torch_dist, is_initialized=lambda: True, get_rank=lambda group: 0, all_reduce=None):
        assert torch.equal(
            vocab_parallel_cross_entropy(logits, labels, alone), vocab_parallel_cross_entropy(logits, labels)
        )


def test_large_logits_do_not_overflow() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
    losses = vocab_parallel_cross_entropy(logits, torch.tensor([1]))
    losses.sum().backward()
    assert losses.item() == pytest.approx(2e4) and torch.isfinite(logits.grad).all()


def test_the_mean_is_weighted_by_the_mask_and_masked_tokens_may_have_any_label() -> None:
    logits, labels, mask = sample()
    mask = mask.double()
    wanted = expected_loss(logits, labels, mask).item()
    assert VocabParallelLoss.slice_weight((labels, mask)) == pytest.approx(mask.sum().item())
    for given in (labels, labels.where(mask != 0, torch.full_like(labels, -1))):
        assert VocabParallelLoss()(logits, (given, mask)).item() == pytest.approx(wanted, rel=1e-12)


def test_ignored_labels_do_not_count_with_and_without_a_mask() -> None:
    logits, labels, _ = sample()
    labels[0, 2:5] = -100
    wanted = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    ones = torch.ones(ROWS, TOKENS, dtype=torch.float64)
    for given in (labels, (labels, ones)):
        assert VocabParallelLoss()(logits, given).item() == pytest.approx(wanted.item(), rel=1e-12)
        assert VocabParallelLoss.slice_weight(given) == ROWS * TOKENS - 3


@pytest.mark.parametrize("cross_entropy", ["exact", "megatron"])
@pytest.mark.parametrize("bad", [-1, VOCAB, VOCAB + 100])
def test_a_label_outside_of_the_vocabulary_is_an_error(bad: int, cross_entropy: str) -> None:
    """Megatron's own cross entropy takes its logit for 0."""
    logits, labels, _ = sample()
    labels[1, 3] = bad
    with pytest.raises(ValueError, match=f"labels outside of the vocabulary of {VOCAB}: 1, first label {bad}"):
        VocabParallelLoss(cross_entropy)(logits, labels)


def test_labels_of_another_form_are_refused() -> None:
    logits, labels, mask = sample()
    with pytest.raises(ValueError, match="one shape"):
        VocabParallelLoss()(logits, (labels, mask[:, :-1]))
    with pytest.raises(ValueError, match='"exact" or "megatron"'):
        VocabParallelLoss("fused")


def split_loss(label: int) -> tuple[float, Tensor] | str:
    """On each rank: loss and gradient of its share of the vocabulary, or what was refused."""
    import torch.distributed as torch_dist

    logits, labels, mask = sample()
    labels[0, 0] = label
    mine = logits.detach().chunk(2, dim=-1)[torch_dist.get_rank()].clone().requires_grad_()
    loss_fn = VocabParallelLoss()
    loss_fn.groups = {VOCAB // 2: torch_dist.group.WORLD}  # type: ignore[misc]
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
