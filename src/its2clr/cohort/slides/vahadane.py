r"""Vahadane's stain separation: sparse non-negative matrix factorisation of optical densities.

$$\min_{W, H \ge 0} \tfrac12 \lVert V - W H \rVert_F^2 + \lambda \lVert H \rVert_1
  , \qquad \lVert W_j \rVert_2 = 1$$

V holds the optical density of each pixel (3, n), W the colours of the two stains (3, 2), H the concentrations (2, n);
lambda is 0.02 as in the authors' code. The two factors are found in turn. For two stains both steps are exact: the
lasso of a pixel has one of three closed forms, and a column of W follows from 2 x 2 and 3 x 2 sums over the pixels.

A. Vahadane et al., Structure-preserving color normalization and sparse stain separation for histological images,
IEEE Transactions on Medical Imaging 35(8), 2016.
"""

import torch
from torch import Tensor

SPARSITY = 0.02

_MOST_STEPS = 1000
_SMALLEST_CHANGE = 1e-5


def sparse_stains(densities: Tensor, start: Tensor, sparsity: float = SPARSITY) -> Tensor:
    """Find the colours of two stains.

    Args:
        densities: (3, n) optical densities of tissue; negative ones count as 0.
        start: (3, 2) colours to begin with.
        sparsity: lambda.

    Returns:
        (3, 2) colours of length 1, haematoxylin (more red density) first.
    """
    values = densities.clamp(min=0)
    colours: Tensor = start / start.norm(dim=0)
    for _ in range(_MOST_STEPS):
        before = colours
        colours = _update_colours(values, sparse_concentrations(values, colours, sparsity), colours)
        if float((colours - before).abs().max()) < _SMALLEST_CHANGE:
            break
    haematoxylin_first = bool(colours[0, 0] >= colours[0, 1])
    return colours if haematoxylin_first else colours.flip(1)


def sparse_concentrations(densities: Tensor, colours: Tensor, sparsity: float = SPARSITY) -> Tensor:
    """Solve the non-negative lasso of every pixel exactly, given colours of length 1.

    If the optimum without the bound is not negative, it is the solution. Otherwise one concentration is 0, and the
    stain that explains more alone has the other.

    Args:
        densities: (..., 3, n).
        colours: (3, 2).
        sparsity: lambda.

    Returns:
        (..., 2, n) concentrations.
    """
    gain = (colours.T @ densities.clamp(min=0)).sub_(sparsity)
    first, second = gain.unbind(-2)
    overlap = (colours[:, 0] * colours[:, 1]).sum()
    both_first, both_second = first - overlap * second, second - overlap * first  # times 1 - overlap^2
    both = torch.minimum(both_first, both_second) >= 0
    scale = 1 / (1 - overlap**2).clamp(min=1e-12)
    alone_first = torch.where(first >= second, first, 0).clamp_(min=0)
    alone_second = torch.where(first >= second, 0, second).clamp_(min=0)
    return torch.stack(
        [
            torch.where(both, both_first * scale, alone_first),
            torch.where(both, both_second * scale, alone_second),
        ],
        dim=-2,
    )


def _update_colours(values: Tensor, concentrations: Tensor, colours: Tensor) -> Tensor:
    """One pass over the columns of W, each at its optimum given the other (Mairal et al. 2010, algorithm 2)."""
    squares = concentrations @ concentrations.T  # (2, 2)
    products = values @ concentrations.T  # (3, 2)
    colours = colours.clone()
    for stain in range(2):
        column = products[:, stain] - colours @ squares[:, stain] + colours[:, stain] * squares[stain, stain]
        column.clamp_(min=0)  # its length does not matter, so the quotient by the sum of squares is left out
        length = column.norm()
        colours[:, stain] = torch.where(length > 0, column / length.clamp(min=1e-30), colours[:, stain])
    return colours
