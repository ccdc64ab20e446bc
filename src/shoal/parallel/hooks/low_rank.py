"""The linear algebra of PowerSGD: products of matrices with few rows.

A matrix M of shape [n, m] is approximated by P^T Q with P of shape [r, n] and Q of shape [r, m].  The factors
have few rows instead of few columns, because libraries are optimised for large matrices: with r between 2 and
8 and M of 1024 x 1024, M Q^T with factors of r columns takes 5 to 8 times as long, and M^T P^T up to 30
times.  For the same reason P^T Q is a sum of r outer products for small r.

All matrices come in batches of equal shape: P is [b, r, n], Q [b, r, m] and M [b, n, m].
"""

from __future__ import annotations

import torch

#: Up to this rank a sum of outer products is faster than a matrix product.
_MAX_OUTER_PRODUCT_RANK = 8


def orthogonalize(rows: torch.Tensor, epsilon: float = 0) -> None:
    """Make the r rows of each matrix orthonormal, in place, without changing their span.

    Rows that depend linearly on previous ones (zeros, for example) become arbitrary independent directions.

    Args:
        rows: [b, r, n] with r <= n; 16-bit floats are computed in float32.
        epsilon: added to the length of each row's independent part before the row is divided by it, so that
            rows much shorter than ``epsilon`` become almost zero instead of unit length.
    """
    exact = rows if rows.dtype.itemsize > 2 else rows.float()
    q, r = torch.linalg.qr(exact.mT)
    if epsilon:
        lengths = r.diagonal(dim1=-2, dim2=-1).abs()
        q = q * (lengths / (lengths + epsilon)).unsqueeze(-2)
    rows.copy_(q.mT)


def left_factor(m: torch.Tensor, q: torch.Tensor, out: torch.Tensor) -> None:
    """P = Q M^T."""
    torch.bmm(q, m.mT, out=out)


def right_factor(m: torch.Tensor, p: torch.Tensor, out: torch.Tensor) -> None:
    """Q = P M."""
    torch.bmm(p, m, out=out)


def product(p: torch.Tensor, q: torch.Tensor, out: torch.Tensor) -> None:
    """M = P^T Q."""
    if p.shape[1] > _MAX_OUTER_PRODUCT_RANK:
        torch.bmm(p.mT, q, out=out)
        return
    torch.mul(p[:, 0, :, None], q[:, 0, None, :], out=out)
    for row in range(1, p.shape[1]):
        out.addcmul_(p[:, row, :, None], q[:, row, None, :])


def residual(m: torch.Tensor, p: torch.Tensor, q: torch.Tensor, out: torch.Tensor) -> None:
    """M - P^T Q."""
    if p.shape[1] > _MAX_OUTER_PRODUCT_RANK:
        torch.baddbmm(m, p.mT, q, alpha=-1, out=out)
        return
    torch.addcmul(m, p[:, 0, :, None], q[:, 0, None, :], value=-1, out=out)
    for row in range(1, p.shape[1]):
        out.addcmul_(p[:, row, :, None], q[:, row, None, :], value=-1)
