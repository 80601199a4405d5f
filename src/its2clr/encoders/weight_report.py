"""What became of every tensor of a file of weights, in numbers and in words."""

from dataclasses import dataclass
from typing import Any

_SHOWN = 6


@dataclass(frozen=True)
class WeightReport:
    """Which tensors of a file went where.

    Attributes:
        source: The file.
        layout: How its names were understood.
        expected: Number of tensors of the encoder's backbone.
        matched: Those that the file has, by timm's name.
        missing: Those that it has not.
        other_shape: Those that it has with another shape, and the shapes.
        resized: Those that were resampled to the encoder's size.
        excess: Names in the file of parts that this backbone does not have.
        unused: Every name in the file that is in none of these.
        share: Matched share of the backbone: of its tensors or of its numbers, whichever is less.
        projector: What became of a projection head.
        constants: Which normalisation constants hold, and why.
        notes: Advice.
    """

    source: str
    layout: str
    expected: int
    matched: tuple[str, ...]
    missing: tuple[str, ...]
    other_shape: tuple[str, ...]
    resized: tuple[str, ...]
    excess: tuple[str, ...]
    unused: tuple[str, ...]
    share: float
    projector: str
    constants: str
    notes: tuple[str, ...]

    def lines(self) -> list[str]:
        """The report in words, counts with the first names."""
        return [
            f"weights {self.source}, read as {self.layout}",
            f"  matched {len(self.matched)} of the encoder's {self.expected} tensors ({self.share:.1%} of it)",
            *(
                f"  {word}: {_listed(names)}"
                for word, names in (
                    ("missing, left as they were", self.missing),
                    ("of another shape, not loaded", self.other_shape),
                    ("resized", self.resized),
                    ("of a part that the encoder does not have", self.excess),
                    ("unused", self.unused),
                )
                if names
            ),
            f"  projection head: {self.projector}",
            f"  normalisation: {self.constants}",
            *(f"  note: {note}" for note in self.notes),
        ]

    def as_dict(self) -> dict[str, Any]:
        """For weights.json."""
        return dict(vars(self))


def _listed(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{len(names)}: {', '.join(names[:_SHOWN])}{more}"
