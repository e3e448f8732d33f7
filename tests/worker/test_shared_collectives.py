"""Collectives through shared memory: what they give, that ranks never mix two exchanges, and how they fail."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from mini_engine.model.parallel import TensorParallel
from mini_engine.worker.shared_collectives import PIECE_BYTES, RankEnded, RankLost, meet
from tests.support import script

SIZES = pytest.mark.parametrize("size", [2, 4])


@SIZES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("shape", [(0, 4), (7, 33), (3, PIECE_BYTES // 8 + 5)])
def test_all_reduce_all_gather_gather_and_broadcast(size, shape, dtype, runtime):
    parts = torch.stack([torch.randn(shape, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(size)])

    def work(tp: TensorParallel) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        own = parts[tp.rank]
        return tp.all_reduce(own.clone()), tp.all_gather(own), tp.gather(own), tp.broadcast(own.clone())

    results = script.on_ranks(size, runtime, work)
    for rank, (summed, gathered, on_first, first) in enumerate(results):
        torch.testing.assert_close(summed, parts.double().sum(0).to(dtype))
        assert torch.equal(summed, results[0][0]) and torch.equal(gathered, parts) and torch.equal(first, parts[0])
        assert on_first is None if rank else torch.equal(on_first, parts)


@SIZES
def test_a_rank_that_is_ahead_does_not_write_over_what_others_read(size, runtime):
    """Each rank in turn comes late; with one set of areas it would read what the others wrote for the next exchange."""

    def work(tp: TensorParallel) -> Tensor:
        seen = []
        for number in range(60):
            if number % size == tp.rank:
                time.sleep(0.001)
            seen.append(tp.all_reduce(torch.full((4096,), float(number * 10 + tp.rank))))
        return torch.stack(seen)

    for seen in script.on_ranks(size, runtime, work):
        expected = [sum(number * 10.0 + rank for rank in range(size)) for number in range(60)]
        assert torch.equal(seen, torch.tensor(expected).unsqueeze(1).expand(60, 4096))


def test_the_end_of_a_rank_is_noticed_at_once(runtime):
    ended, noticed = threading.Event(), threading.Barrier(2)

    def work(tp: TensorParallel) -> None:
        if tp.rank == 1:
            tp.collectives.close()
            ended.set()
            return
        ended.wait()
        with pytest.raises(RankEnded, match="rank 1 exited"):
            tp.all_reduce(torch.zeros(4))
        noticed.wait(60)  # a rank that returns disconnects

    script.on_ranks(3, runtime, work)


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
