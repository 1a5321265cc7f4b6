"""The assignment problem: partners for all rows so that the sum of their costs is least, by shortest augmenting paths.

The method of Jonker and Volgenant (1987) in the form for rectangular matrices (Crouse, 2016), in float64, with a first
round that gives every row its cheapest column where no other row wants it: weights of related models are nearly done
then.  O(n^3) at worst.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def assign(cost: Floats) -> NDArray[np.int64]:
    """Columns of the rows [n] of a finite cost matrix [n, m] with n <= m."""
    n, m = cost.shape
    assert n <= m and np.isfinite(cost).all()
    row_of, column_of = np.full(m, -1), np.full(n, -1)
    v = np.zeros(m)  # prices of columns; rows need none of their own: u = cost - v at the row's partner
    cheapest = cost.argmin(axis=1)
    for i in range(n):
        if row_of[cheapest[i]] < 0:
            row_of[cheapest[i]], column_of[i] = i, cheapest[i]
    for start in np.flatnonzero(column_of < 0):
        _augment(int(start), cost, v, row_of, column_of)
    return column_of.astype(np.int64)


def _augment(start: int, cost: Floats, v: Floats, row_of: NDArray[np.int64], column_of: NDArray[np.int64]) -> None:
    """Match one more row along the shortest path of reduced costs, and change prices so that all partners stay best."""
    m = cost.shape[1]
    distance, before = np.full(m, np.inf), np.full(m, start)
    done = np.zeros(m, dtype=bool)
    row, reached = start, 0.0
    while True:
        # what row i pays beyond its own partner, or beyond nothing for the row that has none
        own = 0.0 if column_of[row] < 0 else cost[row, column_of[row]] - v[column_of[row]]
        through = reached + cost[row] - v - own
        better = ~done & (through < distance)
        distance[better], before[better] = through[better], row
        column = int(np.where(done, np.inf, distance).argmin())
        reached, done[column] = float(distance[column]), True
        if row_of[column] < 0:
            break
        row = int(row_of[column])
    v[done] -= reached - distance[done]
    while True:
        row = int(before[column])
        row_of[column] = row
        column_of[row], column = column, int(column_of[row])
        if row == start:
            return
