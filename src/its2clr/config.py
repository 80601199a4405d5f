"""Settings of every stage: pydantic models that refuse unknown keys."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Probability = Annotated[float, Field(ge=0.0, le=1.0)]
Share = Annotated[float, Field(gt=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
Count = Annotated[int, Field(ge=1)]
OptionValue = bool | int | float | str | None
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]
FEATURES = "features"
"""Name of the encoder, and of the recipe, where a cohort holds features instead of tiles."""
HUB_PREFIXES = ("hf-hub:", "hf_hub:")
"""How a name on timm's hub begins."""

MOST_FOR_ADAMW = 0.01
"""Above this a learning rate was surely meant for SGD."""


class Section(BaseModel):
    """A group of settings; a key it does not know is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class EncoderConfig(Section):
    """The feature extractor f."""

    name: str = Field("resnet18", description="any timm model name; set to features where the cohort holds features")
    options: dict[str, Any] = Field(default_factory=dict, description="passed on to timm.create_model")
    pretrained: bool = Field(default=False, description="start from timm's pretrained weights")
    weights: str | None = Field(
        None, description="weights to start from: a file, a folder in timm's hub layout, or a hub name (hf-hub:...)"
    )
    weights_matched: Share = Field(
        0.9, description="share of the encoder's tensors that must be in `weights`; fewer is an error"
    )
    norm: Literal["batch", "instance"] = Field("batch", description="normalisation layers of a ResNet")
    mean: tuple[float, float, float] = Field(
        (0.485, 0.456, 0.406), description="channel means in [0, 1]; default: of the weights"
    )
    std: tuple[Positive, Positive, Positive] = Field((0.229, 0.224, 0.225), description="channel deviations; as mean")

    @field_validator("weights")
    @classmethod
    def _absolute(cls, weights: str | None) -> str | None:
        return weights if weights is None or weights.startswith(HUB_PREFIXES) else str(Path(weights).absolute())

    @model_validator(mode="after")
    def _one_start(self) -> "EncoderConfig":
        if self.pretrained and self.weights is not None:
            raise ValueError("weights and pretrained both name weights to start from; give one of them")
        return self


class ProjectorConfig(Section):
    """The projection head psi: two linear layers with a ReLU between."""

    hidden_dim: Count = Field(512, description="width of the hidden layer")
    output_dim: Count = Field(256, description="dimension of the embedding the contrastive loss sees")
    norm: Literal["none", "batch"] = Field(
        "none", description="batch normalisation of the hidden layer; short trainings collapse less with it"
    )


class AdapterConfig(Section):
    """The residual adapter that is refined where a cohort holds features instead of tiles."""

    hidden_dim: Count = Field(256, description="width of the adapter's hidden layer")
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(0.1, description="dropout on the hidden layer in training")
    feature_noise: Annotated[float, Field(ge=0)] = Field(
        0.2, description="noise of a view, as a share of each feature's deviation over the training instances"
    )
    feature_dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.1, description="share of a view's features that are replaced by their mean"
    )


class ViewsConfig(Section):
    """Random views of a tile; the defaults are the paper's (appendix A.2)."""

    jitter_probability: Probability = Field(0.8, description="share of tiles whose colours are jittered")
    brightness: Annotated[float, Field(ge=0, le=1)] = Field(0.8, description="factor in [1 - b, 1 + b]")
    contrast: Annotated[float, Field(ge=0, le=1)] = Field(0.8, description="factor in [1 - c, 1 + c]")
    saturation: Annotated[float, Field(ge=0, le=1)] = Field(0.8, description="factor in [1 - s, 1 + s]")
    hue: Annotated[float, Field(ge=0, le=0.5)] = Field(0.2, description="shift in [-h, h] turns")
    grayscale_probability: Probability = Field(0.2, description="share of tiles turned gray")
    blur_probability: Probability = Field(0.5, description="share of tiles blurred")
    blur_kernel: Probability = Field(0.06, description="blur kernel as a share of the tile's side")
    blur_sigma: tuple[Positive, Positive] = Field((0.1, 2.0), description="range of the blur's sigma in pixels")
    horizontal_flip: Probability = Field(0.5, description="probability of a left-right flip")
    vertical_flip: Probability = Field(0.5, description="probability of an up-down flip")
    quarter_turn: Probability = Field(
        0.0,
        description="probability of a quarter turn; at 0.5, with both flips at 0.5, all eight orientations are alike",
    )
    crop_scale: tuple[Share, Share] | None = Field(
        None, description="area range of a random resized crop; null leaves the tile whole"
    )
    crop_ratio: tuple[Positive, Positive] = Field((0.75, 4 / 3), description="aspect ratio range of the crop")

    @model_validator(mode="after")
    def _ordered(self) -> "ViewsConfig":
        for name in ("blur_sigma", "crop_scale", "crop_ratio"):
            bounds = getattr(self, name)
            if bounds is not None and bounds[0] > bounds[1]:
                raise ValueError(f"{name}: the first number must not be larger than the second, got {bounds}")
        return self


class OptimiserConfig(Section):
    """SGD with a learning rate that is constant or falls to zero as a cosine."""

    learning_rate: Positive = Field(0.03, description="peak learning rate")
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(0.9, description="SGD momentum")
    weight_decay: Annotated[float, Field(ge=0)] = Field(1e-4, description="L2 penalty")
    schedule: Literal["cosine", "constant"] = Field("cosine", description="course of the learning rate")


class DinoConfig(Section):
    """What only DINO has; the defaults are its paper's but for fewer prototypes and local views."""

    hidden_dim: Count = Field(2048, description="width of its head")
    bottleneck_dim: Count = Field(256, description="dimension before the prototypes")
    output_dim: Annotated[int, Field(ge=2)] = Field(4096, description="prototypes; the paper of DINO has 65536")
    student_temperature: Positive = Field(0.1, description="temperature of the student")
    teacher_temperature: Positive = Field(0.04, description="temperature of the teacher; lower is sharper")
    centre_momentum: Annotated[float, Field(ge=0, lt=1)] = Field(0.9, description="of the teacher's mean output")
    local_views: Annotated[int, Field(ge=0)] = Field(2, description="small crops of a tile beside its two views")
    local_scale: tuple[Share, Share] = Field((0.05, 0.4), description="area range of a local crop")
    local_size: Count | None = Field(
        None, description="side of local crops in pixels; null: the tile's, which every encoder takes"
    )


class PretrainConfig(OptimiserConfig):
    """The start of the encoder; the defaults are SimCLR's (paper, appendix A.2)."""

    method: str = Field(
        "simclr",
        description="self-supervised method: simclr, moco, byol, dino or one of a plugin; bag_labels trains tiles with "
        "the label of their bag",
    )
    optimiser: Literal["sgd", "adamw"] = Field("sgd", description="adamw is for vision transformers")
    warmup_epochs: Annotated[int, Field(ge=0)] = Field(
        0, description="epochs in which the learning rate rises from zero"
    )
    epochs: Annotated[int, Field(ge=0)] = Field(600, description="passes over the training instances; 0 skips")
    batch_size: Annotated[int, Field(ge=2)] = Field(512, description="instances per step over all processes")
    temperature: Positive = Field(0.5, description="temperature of the contrastive loss (SimCLR, MoCo)")
    momentum_encoder: Probability | None = Field(
        None, description="momentum of the encoder's copy; null: MoCo 0.999, BYOL 0.99 and DINO 0.996 rising to 1"
    )
    queue_size: Count = Field(4096, description="embeddings of earlier steps that MoCo contrasts with")
    dino: DinoConfig = Field(default_factory=DinoConfig)
    check_every: Annotated[int, Field(ge=0)] = Field(
        0,
        description="epochs between two checks of the encoder by the validation bag AUC of a quick aggregator, which "
        "then decide what is kept; 0: none, the last epoch is kept",
    )
    check_epochs: Count = Field(20, description="epochs of the quick aggregator")
    patience: Count | None = Field(None, description="stop after so many checks without a better one; null: never")
    views: ViewsConfig = Field(default_factory=lambda: ViewsConfig(crop_scale=(0.08, 1.0)))
    start: str | None = Field(
        None, description="a run, or a checkpoint of its encoder, to take as the start instead of pretraining one"
    )

    @field_validator("start")
    @classmethod
    def _absolute(cls, start: str | None) -> str | None:
        return None if start is None else str(Path(start).absolute())

    @model_validator(mode="after")
    def _consistent(self) -> "PretrainConfig":
        if self.optimiser == "adamw" and self.learning_rate > MOST_FOR_ADAMW:
            raise ValueError(
                f"learning_rate={self.learning_rate:g} is one for SGD; with optimiser=adamw set about 0.0005"
            )
        if self.warmup_epochs > self.epochs > 0:
            raise ValueError(f"warmup_epochs ({self.warmup_epochs}) is larger than epochs ({self.epochs})")
        if self.patience is not None and self.check_every == 0:
            raise ValueError("patience counts checks of the encoder; set check_every too")
        return self


class AggregatorTraining(Section):
    """Which aggregator, and how it is trained; the defaults are the paper's for Camelyon16."""

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


class LoraSettings(Section):
    """Low-rank adaptation of some linear layers; needs peft."""

    rank: Count = Field(8, description="rank of the changes")
    alpha: Count = Field(16, description="the changes are scaled by alpha / rank")
    targets: list[str] = Field(
        ["attn.qkv", "attn.proj"], min_length=1, description="layers, by the ends of their names"
    )


class RefineConfig(OptimiserConfig):
    """Algorithm 1: iterative, self-paced supervised contrastive refinement."""

    learning_rate: Positive = Field(0.01, description="peak learning rate")
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="SGD momentum")
    epochs: Count = Field(50, description="T: refinement epochs")
    batch_size: Annotated[int, Field(ge=4)] = Field(512, description="instances per step over all processes")
    steps_per_epoch: Count | None = Field(None, description="null: training instances / batch_size, rounded up")
    temperature: Positive = Field(0.07, description="temperature of the supervised contrastive loss")
    threshold: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.3, description="eta: probability above which an instance is pseudo-positive"
    )
    threshold_rule: Literal["fixed", "negative_bags"] = Field(
        "fixed",
        description="eta as set; or where false_positive_rate of the instances of negative validation bags pass it",
    )
    false_positive_rate: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.02, description="share of known negatives that may pass the threshold, with threshold_rule=negative_bags"
    )
    reader: AggregatorTraining | None = Field(
        None, description="aggregator whose instance scores become pseudo labels; null: the run's own"
    )
    positive_fraction: Annotated[float, Field(gt=0, lt=1)] = Field(0.2, description="p_+: share of positive anchors")
    initial_ratio: Share = Field(0.2, description="r_0: most confident share used after the warm-up")
    final_ratio: Share = Field(0.8, description="r_T: most confident share used at the last epoch")
    warmup_epochs: Annotated[int, Field(ge=0)] = Field(
        15, description="T_warm-up: epochs with anchors from one clean pool only"
    )
    warmup_anchors: Literal["negative", "positive"] = Field(
        "negative",
        description="anchors in the warm-up: negative-bag instances, or pseudo-positives (ablation)",
    )
    refresh_every: Count = Field(5, description="epochs between pseudo-label updates")
    objective: str = Field(
        "supervised_contrastive", description="what the encoder learns from the labels; cross_entropy is a baseline"
    )
    labels: Literal["pseudo", "ground_truth"] = Field(
        "pseudo", description="ground_truth finetunes with the true instance labels: an upper bound, not the method"
    )
    iterative: bool = Field(default=True, description="replace pseudo labels when validation AUC allows it")
    self_paced: bool = Field(
        default=True, description="warm-up, then only the most confident share; false uses every pseudo label"
    )
    aggregator_seeds: Count = Field(
        1, description="aggregators trained per update; pseudo labels are their mean probability"
    )
    freeze_until: str | None = Field(
        None, description="last block of the encoder that is not trained, nor any before it; null: all are trained"
    )
    lora: LoraSettings | None = Field(
        None, description="train low-rank changes of a transformer's layers instead of its weights; null: the weights"
    )
    corrections: str | None = Field(
        None, description="folder of GeoJSON files, one per bag, that mark tiles as truly positive or negative"
    )
    views: ViewsConfig = Field(default_factory=ViewsConfig)

    @model_validator(mode="after")
    def _consistent(self) -> "RefineConfig":
        if self.warmup_epochs > self.epochs:
            raise ValueError(f"warmup_epochs ({self.warmup_epochs}) is larger than epochs ({self.epochs})")
        if self.freeze_until is not None and self.lora is not None:
            raise ValueError("freeze_until and lora: with lora all weights of the encoder are frozen; set one of them")
        return self


class EndToEndConfig(OptimiserConfig):
    """Encoder and aggregator trained together on whole bags, with Adam: a baseline of the paper."""

    learning_rate: Positive = Field(1e-4, description="peak learning rate")
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(0.9, description="decay rate of Adam's first moment")
    start: Literal["pretrained", "scratch"] = Field("pretrained", description="weights the encoder starts from")
    epochs: Count = Field(50, description="passes over the training bags")
    bags_per_step: Count = Field(1, description="bags per step over all processes")
    tiles_per_pass: Annotated[int, Field(ge=2)] = Field(
        128, description="most tiles whose activations are in memory at once; the gradient is that of whole bags"
    )
    views: ViewsConfig = Field(default_factory=ViewsConfig)


class EvaluationConfig(Section):
    """How the frozen models are measured."""

    retrainings: Count = Field(5, description="aggregators trained anew per encoder; mean and deviation over them")
    bootstrap: Count = Field(1000, description="resamples of the bags for 95% intervals")


class EngineConfig(Section):
    """Device and precision."""

    accelerator: Literal["auto", "cpu", "cuda"] = Field("auto", description="where to compute")
    precision: Literal["auto", "32-true", "bf16-mixed"] = Field(
        "auto", description="auto: bf16-mixed on a GPU, 32-true on a CPU"
    )
    extract_batch_size: Count = Field(512, description="instances per forward pass at extraction")
    tiles: Literal["auto", "gpu", "memory", "disk"] = Field(
        "auto", description="where decoded tiles are kept; auto: the first of GPU, host memory, disk with room"
    )
    tile_folder: str | None = Field(None, description="folder of tiles decoded to disk; null: in the cohort")
    record_steps: bool = Field(
        default=True, description="on a GPU, make views in one kernel and replay training steps as CUDA graphs"
    )
    compile: Literal["auto", "always", "never"] = Field(
        "auto", description="compile the network before training; auto: on a GPU, where the training is long enough"
    )


class RunConfig(Section):
    """Everything a run is made of; saved as config.yaml in its directory."""

    seed: int = Field(0, description="seed of every random choice")
    encoder: EncoderConfig = Field(default_factory=EncoderConfig)
    adapter: AdapterConfig = Field(default_factory=AdapterConfig)
    projector: ProjectorConfig = Field(default_factory=ProjectorConfig)
    pretrain: PretrainConfig = Field(default_factory=PretrainConfig)
    aggregator: AggregatorTraining = Field(default_factory=AggregatorTraining)
    refine: RefineConfig = Field(default_factory=RefineConfig)
    end_to_end: EndToEndConfig = Field(default_factory=EndToEndConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    plugins: list[str] = Field(
        default_factory=list, description="Python files or modules that register aggregators or objectives"
    )

    @field_validator("plugins")
    @classmethod
    def _absolute(cls, plugins: list[str]) -> list[str]:
        return [str(Path(plugin).absolute()) if plugin.endswith(".py") else plugin for plugin in plugins]
