"""Self-pacing: which share of the most confident pseudo labels an epoch may use."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Pacing:
    """The ratio r of section 3.2: r_0 until the end of the warm-up, then a linear rise to r_T at the last epoch.

    Epochs are counted as in the paper: the warm-up is epochs 1 to `warmup_epochs`, the last epoch is `epochs`.

    Attributes:
        initial: r_0.
        final: r_T.
        warmup_epochs: T_warm-up.
        epochs: T.

    Example:
        >>> pacing = Pacing(initial=0.2, final=0.8, warmup_epochs=15, epochs=50)
        >>> pacing.ratio(15), pacing.ratio(50)
        (0.2, 0.8)
    """

    initial: float
    final: float
    warmup_epochs: int
    epochs: int

    def __post_init__(self) -> None:
        for name in ("initial", "final"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in (0, 1], got {getattr(self, name)}")
        if not 0 <= self.warmup_epochs <= self.epochs:
            raise ValueError(f"warmup_epochs must be between 0 and epochs ({self.epochs}), got {self.warmup_epochs}")

    def ratio(self, epoch: int) -> float:
        """Share of each pool used in an epoch (1 to T)."""
        if epoch <= self.warmup_epochs:
            return self.initial
        if epoch >= self.epochs:
            return self.final
        slope = (self.final - self.initial) / (self.epochs - self.warmup_epochs)
        return self.initial + slope * (epoch - self.warmup_epochs)
