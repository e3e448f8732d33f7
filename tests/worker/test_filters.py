"""top_p by its likeliest tokens against a full sort, where the first widths suffice and where they do not."""

from unittest.mock import patch

import pytest
import torch

from mini_engine.worker import filters

VOCABULARY = 1000


def reference(probabilities: torch.Tensor, p: float) -> torch.Tensor:
    """One row, by a stable sort and a plain loop."""
    kept, total = torch.zeros_like(probabilities), 0.0
    for token in sorted(range(len(probabilities)), key=lambda t: (-float(probabilities[t]), t)):
        kept[token] = probabilities[token]
        total += float(probabilities[token])
        if total >= p:
            break
    return kept


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("widths", [(4, 32), (1,), (), (VOCABULARY,), (2000,)])
def test_every_width_gives_the_rows_of_a_full_sort(widths, ties, monkeypatch):
    monkeypatch.setattr(filters, "WIDTHS", widths)
    torch.manual_seed(4)
    logits = torch.randn(24, VOCABULARY) * torch.linspace(0, 8, 24)[torch.randperm(24)].unsqueeze(1)
    if ties:
        logits = logits.round()
    probabilities = logits.softmax(-1)
    top_p = [(0.0, 0.05, 0.3, 0.8, 0.999, 1.0)[i % 6] for i in range(24)]
    ours = probabilities.clone()
    filters.keep_top_p(ours, top_p, [0] * 24)
    for row, before, p in zip(ours, probabilities, top_p, strict=True):
        assert torch.equal(row, before if p == 1.0 else reference(before, p))


def test_a_peaked_row_is_not_sorted_and_a_flat_one_falls_back():
    peaked = torch.full((1, 152_000), 1e-7)
    peaked[0, 70_000] = 1 - peaked.sum()
    flat = torch.full((1, 152_000), 1 / 152_000)
    for probabilities, widths in ((peaked, [32]), (flat, [32, 512, 4096, 152_000])):
        with patch.object(filters, "_try_top_p", wraps=filters._try_top_p) as tried:
            filters.keep_top_p(probabilities, [0.9], [0])
        assert [call.args[3] for call in tried.call_args_list] == widths
    assert peaked.nonzero().tolist() == [[0, 70_000]]
    assert abs(int((flat > 0).sum()) - 0.9 * 152_000) < 10
    assert flat[0, :136_000].all()


def test_top_k_then_top_p_over_what_it_leaves():
    """As a chain of sets: top_p is of the mass that top_k left."""
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0, 0.0]]).log()
    logits[0, 4] = -50.0
    filters.keep_top_k(logits, [2])
    assert logits.isinf().tolist() == [[False, False, True, True, True]]
    probabilities = logits.softmax(-1)
    filters.keep_top_p(probabilities, [4 / 7 - 1e-3], [2])
    assert (probabilities > 0).tolist() == [[True, False, False, False, False]]


@pytest.mark.parametrize(("min_p", "kept"), [(0.0, 4), (0.25, 4), (0.26, 3), (0.5, 3), (0.51, 2), (1.0, 1)])
def test_min_p_is_a_share_of_the_likeliest(min_p, kept):
    # A little above the bounds: logarithms are rounded.
    scores = torch.tensor([[1.0, 0.6, 0.5001, 0.2501]] * 2).log()
    filters.keep_min_p(scores, [min_p, 0.0])
    assert (~scores.isinf()).sum(-1).tolist() == [kept, 4]


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("top_k", [0, 3, 40])
def test_without_looking_the_rows_are_the_same(top_k, ties):
    torch.manual_seed(5)
    scores = torch.randn(12, VOCABULARY) * 4
    if ties:
        scores = scores.round()
    filters.keep_top_k(scores, [top_k] * 12)
    probabilities = scores.softmax(-1)
    top_p = [(0.0, 0.05, 0.3, 0.8, 0.999, 1.0)[i % 6] for i in range(12)]
    seen, unseen = probabilities.clone(), probabilities.clone()
    filters.keep_top_p(seen, top_p, [top_k] * 12)
    filters.keep_top_p_unseen(unseen, top_p, [top_k] * 12)
    assert torch.equal(seen, unseen)
