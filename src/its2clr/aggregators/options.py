"""Types of options that several aggregators share, with the bounds `create_aggregator` checks."""

from typing import Annotated

from pydantic import Field

HiddenDim = Annotated[int | None, Field(ge=1, description="width of the attention; None: the feature dimension")]
Dropout = Annotated[float, Field(ge=0.0, lt=1.0, description="share of values dropped in training")]
Widths = Annotated[
    tuple[Annotated[int, Field(ge=1)], ...], Field(description="widths of layers that come first; empty: none")
]
