"""Settings of an aggregator and its training."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

OptionValue = bool | int | float | str | None
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


class AggregatorTraining(BaseModel):
    """Which aggregator, and how it is trained; the defaults are the paper's for Camelyon16."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field("dsmil", description="aggregator, one of `its2clr.aggregators.aggregator_names()`")
    options: dict[str, OptionValue] = Field(default_factory=dict, description="options of that aggregator")
    epochs: int = Field(350, ge=1, description="most passes over the training bags")
    learning_rate: float = Field(2e-4, gt=0.0, description="Adam's learning rate at the start")
    weight_decay: float = Field(5e-3, ge=0.0, description="Adam's L2 penalty")
    betas: tuple[Beta, Beta] = Field((0.5, 0.9), description="Adam's decay rates of the moments")
    scheduler: Literal["step", "cosine", "constant"] = Field(
        "step",
        description="learning rate by epoch: multiplied by gamma every step_size, cosine to 0, or constant",
    )
    step_size: int = Field(75, ge=1, description="epochs between two steps of the step scheduler")
    gamma: float = Field(0.5, gt=0.0, le=1.0, description="factor of the step scheduler")
    bags_per_step: int = Field(1, ge=1, description="bags of one optimiser step")
    balanced: bool = Field(
        default=False,
        description="draw as many positive as negative bags each epoch, the rarer ones repeatedly",
    )
    patience: int | None = Field(
        default=None,
        ge=1,
        description="stop a seed after so many epochs without a better validation; null: never",
    )
