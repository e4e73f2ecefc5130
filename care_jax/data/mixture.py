"""Several sources as one, each with a sampling weight."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from care_jax.batch import Example
from care_jax.data.rows import locate


class Mixture(Sequence[Example]):
    """The concatenation of several sources; `pipeline.Batches` draws from them by weight.

    Args:
        sources: at least one, none of them empty.
        weights: one per source, all above 0; or all 0, to weight sources by their lengths.
    """

    def __init__(self, sources: Sequence[Sequence[Example]], weights: Sequence[float]):
        check_weights(weights)
        lengths = [len(source) for source in sources]
        if not lengths or not all(lengths):
            raise ValueError(f"expected non-empty sources, got lengths {lengths}; drop empty ones")
        self.sources = list(sources)
        self.weights = list(weights) if any(weights) else [float(length) for length in lengths]
        self._ends = list(itertools.accumulate(lengths))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(f"index {index} is outside 0..{len(self) - 1}")
        number, own_index = locate(self._ends, index)
        return self.sources[number][own_index]


def check_weights(weights: Sequence[float]) -> None:
    """Rejects weights that are neither all above 0 nor all 0."""
    if min(weights, default=0) < 0 or (any(weights) and not all(weights)):
        raise ValueError(
            f"expected a weight above 0 for every part of the mixture, or 0 for all of them, got "
            f"{list(weights)}; change the parts' weights"
        )
