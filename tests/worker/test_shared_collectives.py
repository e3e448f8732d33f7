"""Collectives through shared memory: what they give, that ranks never mix two exchanges, and how they fail."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from mini_engine.worker.shared_collectives import PIECE_BYTES, RankEnded, RankLost, meet


@pytest.fixture(params=[2, 4])
def size(request) -> int:
    return request.param


@pytest.fixture
def ranks(size, runtime):
    """One end for each rank, for threads of this process."""
    with ThreadPoolExecutor(size) as pool:
        yield (met := list(pool.map(lambda rank: meet(runtime / "ranks", rank, size, 60.0, 60.0), range(size))))
    for end in met:
        end.close()


def together(ranks, work):
    """What `work(rank, end)` returns on each rank, all at once."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(work, range(len(ranks)), ranks))


def of_rank(rank: int, shape, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("shape", [(0, 4), (7, 33), (3, PIECE_BYTES // 8 + 5)])
def test_all_reduce_all_gather_gather_and_broadcast(ranks, shape, dtype):
    def work(rank, end):
        end.all_reduce(summed := of_rank(rank, shape, dtype))
        end.all_gather(gathered := torch.empty(len(ranks), *shape, dtype=dtype), of_rank(rank, shape, dtype))
        end.gather(on_first := torch.empty_like(gathered) if rank == 0 else None, of_rank(rank, shape, dtype))
        end.broadcast(first := of_rank(rank, shape, dtype))
        return summed, gathered, on_first, first

    parts = torch.stack([of_rank(rank, shape, dtype) for rank in range(len(ranks))])
    results = together(ranks, work)
    assert torch.equal(results[0][2], parts)
    for summed, gathered, _, first in results:
        torch.testing.assert_close(summed, parts.double().sum(0).to(dtype))
        assert torch.equal(summed, results[0][0]) and torch.equal(gathered, parts) and torch.equal(first, parts[0])


def test_a_rank_that_is_ahead_does_not_write_over_what_others_read(ranks):
    """Each rank in turn comes late; with one set of areas it would read what the others wrote for the next exchange."""

    def work(rank, end):
        seen = []
        for number in range(60):
            if number % len(ranks) == rank:
                time.sleep(0.001)
            end.all_reduce(value := torch.full((4096,), float(number * 10 + rank)))
            seen.append(value)
        return torch.stack(seen)

    for seen in together(ranks, work):
        expected = [sum(number * 10.0 + rank for rank in range(len(ranks))) for number in range(60)]
        assert torch.equal(seen, torch.tensor(expected).unsqueeze(1).expand(60, 4096))


@pytest.mark.parametrize("size", [3], indirect=True)
def test_the_end_of_a_rank_is_noticed_at_once(ranks):
    ranks[1].close()
    for rank in (0, 2):
        with pytest.raises(RankEnded, match="rank 1 exited"):
            ranks[rank].all_reduce(torch.zeros(4))


def test_a_rank_that_does_not_come_is_waited_for_so_long(runtime):
    """And at the start for longer than in a collective."""

    def come(rank):
        time.sleep(0.4 * rank)
        return meet(runtime / "ranks", rank, 2, 60.0, 0.2)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(come, range(2))
    with pytest.raises(RankLost, match=r"timed out waiting for rank 1 \(0.2 s, --collective-timeout\)"):
        first.all_reduce(torch.zeros(4))
    first.close()
    second.close()
