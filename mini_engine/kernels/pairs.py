"""Tokens and the experts that they have chosen."""

from typing import NamedTuple

from torch import Tensor


class Pairs(NamedTuple):
    """Tokens and the experts that each has chosen, by expert. Pair i is of token `i // each`.

    order: int32 `[pairs]`, the numbers of pairs, those of the first expert first.
    ends: int32 `[experts]`, for each expert the place in this order after its last pair.
    """

    order: Tensor
    ends: Tensor
    each: int
