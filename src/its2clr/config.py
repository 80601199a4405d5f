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
"""Name of the encoder, and of the recipe, for a cohort that holds features instead of tiles."""
STANDARD = "standard"
"""Name of the recipe that a new run takes if none is named."""
HUB_PREFIXES = ("hf-hub:", "hf_hub:")
"""A name on timm's hub begins with one of these."""

MOST_FOR_ADAMW = 0.01
"""A higher learning rate was surely meant for SGD."""


class Section(BaseModel):
    """A group of settings; a key it does not know is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class EncoderConfig(Section):
    """The feature extractor f."""

    name: str = Field("resnet18", description="name of any timm model; set to features for a cohort of features")
    options: dict[str, Any] = Field(default_factory=dict, description="arguments for timm.create_model")
    pretrained: bool = Field(default=False, description="start from timm's pretrained weights")
    weights: str | None = Field(
        None, description="weights to start from: a file, a folder in timm's hub layout, or a hub name (hf-hub:...)"
    )
    weights_matched: Share = Field(
        0.9, description="share of the encoder's tensors that must be in `weights`; if fewer are, the run stops"
    )
    norm: Literal["batch", "instance"] = Field("batch", description="kind of normalisation layers in a ResNet")
    mean: tuple[float, float, float] = Field(
        (0.485, 0.456, 0.406), description="mean of each colour channel in [0, 1]; default: those the weights expect"
    )
    std: tuple[Positive, Positive, Positive] = Field(
        (0.229, 0.224, 0.225), description="standard deviation of each colour channel; default: as for mean"
    )

    side_by_side: bool = Field(
        default=False,
        description="two networks of this kind, the start and the refined one; set in the encoders that "
        "refine.beside_start makes, not by hand",
    )

    @field_validator("weights")
    @classmethod
    def _absolute(cls, weights: str | None) -> str | None:
        return weights if weights is None or weights.startswith(HUB_PREFIXES) else str(Path(weights).absolute())

    @model_validator(mode="after")
    def _one_start(self) -> "EncoderConfig":
        if self.pretrained and self.weights is not None:
            raise ValueError("weights and pretrained both name weights to start from; set only one of them")
        return self


class ProjectorConfig(Section):
    """The projection head psi: two linear layers with a ReLU between them."""

    hidden_dim: Count = Field(512, description="width of the hidden layer")
    output_dim: Count = Field(256, description="dimension of the embedding the contrastive loss sees")
    norm: Literal["none", "batch"] = Field(
        "none", description="normalisation of the hidden layer; with batch, short trainings collapse less often"
    )


class AdapterConfig(Section):
    """The residual adapter that is refined if a cohort holds features instead of tiles."""

    hidden_dim: Count = Field(256, description="width of the adapter's hidden layer")
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(0.1, description="dropout on the hidden layer in training")
    feature_noise: Annotated[float, Field(ge=0)] = Field(
        0.2, description="noise added to a view, as a share of each feature's deviation over the training instances"
    )
    feature_dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.1, description="share of a view's features that is replaced by their mean"
    )


class ViewsConfig(Section):
    """Random views of a tile; the defaults are the paper's (appendix A.2)."""

    jitter_probability: Probability = Field(0.8, description="share of tiles whose colours are changed")
    brightness: Annotated[float, Field(ge=0, le=1)] = Field(
        0.8, description="brightness is multiplied by a factor in [1 - b, 1 + b]"
    )
    contrast: Annotated[float, Field(ge=0, le=1)] = Field(
        0.8, description="contrast is multiplied by a factor in [1 - c, 1 + c]"
    )
    saturation: Annotated[float, Field(ge=0, le=1)] = Field(
        0.8, description="saturation is multiplied by a factor in [1 - s, 1 + s]"
    )
    hue: Annotated[float, Field(ge=0, le=0.5)] = Field(0.2, description="hue is shifted by [-h, h] of a full turn")
    grayscale_probability: Probability = Field(0.2, description="share of tiles turned gray")
    blur_probability: Probability = Field(0.5, description="share of tiles blurred")
    blur_kernel: Probability = Field(0.06, description="size of the blur kernel, as a share of the tile's side")
    blur_sigma: tuple[Positive, Positive] = Field((0.1, 2.0), description="range of the blur's sigma in pixels")
    horizontal_flip: Probability = Field(0.5, description="probability of a left-right flip")
    vertical_flip: Probability = Field(0.5, description="probability of an up-down flip")
    quarter_turn: Probability = Field(
        0.0,
        description="probability of a quarter turn; if it and both flips are 0.5, all orientations are equally likely",
    )
    crop_scale: tuple[Share, Share] | None = Field(
        None, description="smallest and largest share of the tile's area that a random crop keeps; null: no crop"
    )
    crop_ratio: tuple[Positive, Positive] = Field(
        (0.75, 4 / 3), description="smallest and largest aspect ratio of the crop"
    )

    @model_validator(mode="after")
    def _ordered(self) -> "ViewsConfig":
        for name in ("blur_sigma", "crop_scale", "crop_ratio"):
            bounds = getattr(self, name)
            if bounds is not None and bounds[0] > bounds[1]:
                raise ValueError(f"{name}: the first number must not be larger than the second, got {bounds}")
        return self


class OptimiserConfig(Section):
    """SGD with a learning rate that is constant or falls to zero along a cosine."""

    learning_rate: Positive = Field(0.03, description="highest learning rate")
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(0.9, description="SGD momentum")
    weight_decay: Annotated[float, Field(ge=0)] = Field(1e-4, description="L2 penalty")
    schedule: Literal["cosine", "constant"] = Field(
        "cosine", description="how the learning rate changes: falls to zero along a cosine, or stays constant"
    )


class DinoConfig(Section):
    """Settings of DINO only. The defaults suit short trainings; docs/guide/starting-points.md has its paper's."""

    hidden_dim: Count = Field(2048, description="width of DINO's head")
    bottleneck_dim: Count = Field(256, description="dimension before the prototypes")
    output_dim: Annotated[int, Field(ge=2)] = Field(4096, description="number of prototypes; DINO's paper has 65536")
    student_temperature: Positive = Field(0.1, description="temperature of the student")
    teacher_temperature: Positive = Field(0.04, description="temperature of the teacher; lower is sharper")
    teacher_warmup_epochs: Annotated[int, Field(ge=0)] = Field(
        0,
        description="number of first epochs in which the teacher's temperature changes from first_teacher_temperature",
    )
    first_teacher_temperature: Positive = Field(
        0.04, description="temperature of the teacher in the first epoch of its warm-up"
    )
    centre_momentum: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.9, description="momentum of the teacher's mean output"
    )
    norm_last_layer: bool = Field(
        default=True, description="keep all prototypes at length one; DINO's paper does not do so for a small ViT"
    )
    frozen_epochs: Annotated[int, Field(ge=0)] = Field(
        0, description="number of first epochs in which the prototypes are not trained"
    )
    local_views: Annotated[int, Field(ge=0)] = Field(
        2, description="number of small crops of a tile, besides its two views"
    )
    local_scale: tuple[Share, Share] = Field(
        (0.05, 0.4), description="smallest and largest share of the tile's area that a local crop keeps"
    )
    local_size: Count | None = Field(
        None, description="side of local crops in pixels; null: the side of the tile, which suits every encoder"
    )


class PretrainConfig(OptimiserConfig):
    """How the start is made; the defaults are the paper's for SimCLR (appendix A.2)."""

    method: str = Field(
        "simclr",
        description="self-supervised method: simclr, moco, byol, dino or one from a plugin; or bag_labels, which "
        "trains every tile with the label of its bag",
    )
    optimiser: Literal["sgd", "adamw"] = Field("sgd", description="adamw is for vision transformers")
    warmup_epochs: Annotated[int, Field(ge=0)] = Field(
        0, description="number of first epochs in which the learning rate rises from zero"
    )
    weight_decay_end: Annotated[float, Field(ge=0)] | None = Field(
        None,
        description="weight decay after the last step, which it reaches along a cosine; null: it stays the same; "
        "needs adamw",
    )
    decay_biases: bool = Field(
        default=True, description="weight decay also of biases and norm layers, not of matrices only; false needs adamw"
    )
    gradient_clip: Positive | None = Field(
        None, description="largest norm of the gradient of each weight tensor, as in DINO's code; null: any"
    )
    epochs: Annotated[int, Field(ge=0)] = Field(
        600, description="passes over the training instances; 0: no pretraining"
    )
    least_steps: Count = Field(
        1, description="fewest steps of the whole training: a small cohort is gone through several times per epoch"
    )
    batch_size: Annotated[int, Field(ge=2)] = Field(512, description="instances per step, over all processes")
    temperature: Positive = Field(0.5, description="temperature of the contrastive loss (SimCLR, MoCo)")
    momentum_encoder: Probability | None = Field(
        None,
        description="momentum of the encoder's copy; null: MoCo 0.999; BYOL 0.99 (its authors' for up to 300 epochs; "
        "0.996 for 1000) and DINO 0.996, both rising to 1",
    )
    queue_size: Count = Field(4096, description="number of embeddings of earlier steps that MoCo contrasts with")
    dino: DinoConfig = Field(default_factory=DinoConfig)
    check_every: Annotated[int, Field(ge=0)] = Field(
        0,
        description="epochs between two checks; a check trains a quick aggregator and measures its validation bag AUC, "
        "and the encoder of the best check is kept; 0: no checks, the last epoch is kept",
    )
    check_epochs: Count = Field(20, description="epochs for which a check trains its aggregator")
    patience: Count | None = Field(
        None, description="stop after this many checks without a better AUC; null: never stop early"
    )
    views: ViewsConfig = Field(default_factory=lambda: ViewsConfig(crop_scale=(0.08, 1.0)))
    start: str | None = Field(
        None, description="a run, or a checkpoint of its encoder, to use as the start instead of pretraining"
    )

    @field_validator("start")
    @classmethod
    def _absolute(cls, start: str | None) -> str | None:
        return None if start is None else str(Path(start).absolute())

    @model_validator(mode="after")
    def _consistent(self) -> "PretrainConfig":
        if self.optimiser == "adamw" and self.learning_rate > MOST_FOR_ADAMW:
            raise ValueError(f"learning_rate={self.learning_rate:g} suits SGD; with optimiser=adamw set about 0.0005")
        if self.decays_apart and self.optimiser != "adamw":
            raise ValueError("weight_decay_end and decay_biases=false need optimiser=adamw, whose decay is no gradient")
        if self.warmup_epochs > self.epochs > 0:
            raise ValueError(f"warmup_epochs ({self.warmup_epochs}) is larger than epochs ({self.epochs})")
        if self.patience is not None and self.check_every == 0:
            raise ValueError("patience counts checks of the encoder; set check_every too")
        return self

    @property
    def decays_apart(self) -> bool:
        """Whether the weights decay apart from the optimiser, which knows one decay for all weights and steps."""
        return self.weight_decay_end is not None or not self.decay_biases


class AggregatorTraining(Section):
    """Which aggregator is used and how it is trained; the defaults are the paper's for Camelyon16."""

    name: str = Field("dsmil", description="name of the aggregator, one of `its2clr.aggregators.aggregator_names()`")
    options: dict[str, OptionValue] = Field(default_factory=dict, description="options of this aggregator")
    epochs: int = Field(350, ge=1, description="largest number of passes over the training bags")
    learning_rate: float = Field(2e-4, gt=0.0, description="Adam's learning rate at the start")
    weight_decay: float = Field(5e-3, ge=0.0, description="Adam's L2 penalty")
    betas: tuple[Beta, Beta] = Field((0.5, 0.9), description="Adam's decay rates of the moments")
    scheduler: Literal["step", "cosine", "constant"] = Field(
        "step",
        description="learning rate: multiplied by gamma every step_size epochs, a cosine down to 0, or constant",
    )
    step_size: int = Field(75, ge=1, description="epochs between two steps of the step scheduler")
    gamma: float = Field(0.5, gt=0.0, le=1.0, description="factor of the step scheduler")
    bags_per_step: int = Field(1, ge=1, description="bags per optimiser step")
    balanced: bool = Field(
        default=False,
        description="draw as many positive as negative bags in each epoch; bags of the rarer class are repeated",
    )
    positive_weight: Positive | Literal["balanced"] = Field(
        1.0,
        description="how often a positive bag counts in the loss; balanced: as often as there are negative training "
        "bags for a positive one, so that both classes count the same",
    )
    folds: bool = Field(
        default=False,
        description="leave a different fold of the training bags (by group) out of the training of each seed, so that "
        "every training bag has a score by an aggregator that never saw it",
    )
    patience: int | None = Field(
        default=None,
        ge=1,
        description="stop a seed after this many epochs without a better validation result; null: never stop early",
    )

    @model_validator(mode="after")
    def _balanced_once(self) -> "AggregatorTraining":
        if self.balanced and self.positive_weight == "balanced":
            raise ValueError(
                "balanced=true and positive_weight=balanced would make up for the rarer class twice; set one of them"
            )
        return self


class LoraSettings(Section):
    """Low-rank adaptation (LoRA) of some linear layers; needs peft."""

    rank: Count = Field(8, description="rank of the weight changes")
    alpha: Count = Field(16, description="the weight changes are scaled by alpha / rank")
    targets: list[str] = Field(
        ["attn.qkv", "attn.proj"], min_length=1, description="layers to change, given by the ends of their names"
    )


class RefineConfig(OptimiserConfig):
    """Algorithm 1: iterative, self-paced supervised contrastive refinement."""

    learning_rate: Positive = Field(0.01, description="highest learning rate")
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="SGD momentum")
    epochs: Count = Field(50, description="T: number of refinement epochs")
    constant_epochs: Annotated[int, Field(ge=0)] = Field(
        0,
        description="number of first epochs with the highest learning rate; a cosine follows that is, as in the "
        "authors' code, as long as the whole training, so it ends above zero",
    )
    batch_size: Annotated[int, Field(ge=4)] = Field(512, description="instances per step, over all processes")
    steps_per_epoch: Count | None = Field(
        None, description="steps per epoch; null: training instances / batch_size, rounded up"
    )
    least_steps: Count = Field(
        1, description="fewest steps of an epoch, where steps_per_epoch is null: small cohorts repeat their tiles"
    )
    temperature: Positive = Field(0.07, description="temperature of the supervised contrastive loss")
    threshold: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.3, description="eta: probability above which an instance is pseudo-positive"
    )
    threshold_rule: Literal["fixed", "negative_bags", "false_discoveries"] = Field(
        "fixed",
        description="fixed: use `threshold`; negative_bags: set it so that a share false_positive_rate of the "
        "instances of negative validation bags pass it; false_discoveries: set it as low as it can be while at most a "
        "share false_discovery_rate of the pseudo-positives are expected to be wrong",
    )
    false_positive_rate: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.02,
        description="with threshold_rule=negative_bags, or where no threshold has so few false discoveries: share of "
        "known negatives that may pass the threshold",
    )
    false_discovery_rate: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.2,
        description="with threshold_rule=false_discoveries: share of the pseudo-positives that may be wrong, as "
        "estimated from the instances of positive and of negative validation bags",
    )
    top_instance: bool = Field(
        default=False,
        description="where no instance of a positive bag passes the threshold, count its top instance as positive; "
        "false: the bag has no pseudo-positive, as in the paper",
    )
    reader: AggregatorTraining | None = Field(
        None, description="aggregator whose instance scores become pseudo labels; null: the run's own aggregator"
    )
    positive_fraction: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.2, description="p_+: share of positives in a batch"
    )
    initial_ratio: Share = Field(
        0.2, description="r_0: share of the most confident pseudo labels used right after the warm-up"
    )
    final_ratio: Share = Field(0.8, description="r_T: share of the most confident pseudo labels used in the last epoch")
    warmup_epochs: Annotated[int, Field(ge=0)] = Field(
        15, description="T_warm-up: number of first epochs in which all anchors come from one pool, see warmup_anchors"
    )
    warmup_anchors: Literal["negative", "positive"] = Field(
        "negative",
        description="anchors in the warm-up: instances of negative bags, or pseudo-positives (an ablation)",
    )
    refresh_every: Count = Field(5, description="epochs between two rounds, which may replace the pseudo labels")
    objective: str = Field(
        "supervised_contrastive", description="loss that trains the encoder on the labels; cross_entropy is a baseline"
    )
    labels: Literal["pseudo", "ground_truth"] = Field(
        "pseudo", description="pseudo: the method; ground_truth: finetune with the true instance labels, an upper bound"
    )
    iterative: bool = Field(
        default=True, description="replace the pseudo labels in every round that passes the gate; false: keep the first"
    )
    self_paced: bool = Field(
        default=True,
        description="true: warm-up, then only the most confident share; false: every pseudo label from epoch 1",
    )
    aggregator_seeds: Count = Field(
        1, description="number of readers trained in a round; their mean probability makes the pseudo labels"
    )
    out_of_fold: bool = Field(
        default=False,
        description="label each training bag with the reader that did not see it; the reader needs folds: true",
    )
    gate: Literal["auc", "log_loss", "none"] = Field(
        "auc",
        description="what a round must not lose on the validation bags; auc: the mean AUC of its readers, as in the "
        "paper; log_loss: the log loss of their mean probability; none: every round passes, so the last encoder is "
        "the refined one",
    )
    relabel: Literal["improved", "always"] = Field(
        "improved",
        description="when a round's labels replace those in use; improved: if it passes the gate, as in the paper; "
        "always: in every round, and the gate only chooses the encoder",
    )
    beside_start: bool = Field(
        default=False,
        description="readers and aggregators see the features of the start beside the refined ones, so that nothing "
        "the start knew is lost; the refined encoder is then two networks. Not for given features: their adapter adds "
        "to them",
    )
    pseudo_negatives: Probability = Field(
        1.0, description="largest share of the pseudo-negatives of positive bags that an epoch uses"
    )
    hand_over: Literal["refined", "better"] = Field(
        "refined",
        description="encoder of the model that a run hands over; better: the start, unless the refined one ranks the "
        "validation bags better with the run's own aggregator",
    )
    freeze_until: str | None = Field(
        None, description="freeze all blocks of the encoder up to and including this one; null: train all"
    )
    lora: LoraSettings | None = Field(
        None,
        description="train low-rank changes to a transformer's layers instead of its weights; null: train the weights",
    )
    retries: Annotated[int, Field(ge=0, le=3)] = Field(
        3,
        description="how often a stuck refinement goes back to its last good state and tries again with gentler "
        "settings; 0: it stops at once",
    )
    corrections: str | None = Field(
        None, description="folder of GeoJSON files, one per bag, that mark tiles as truly positive or negative"
    )
    views: ViewsConfig = Field(default_factory=ViewsConfig)

    @model_validator(mode="after")
    def _consistent(self) -> "RefineConfig":
        if self.warmup_epochs > self.epochs:
            raise ValueError(f"warmup_epochs ({self.warmup_epochs}) is larger than epochs ({self.epochs})")
        if self.constant_epochs > self.epochs:
            raise ValueError(f"constant_epochs ({self.constant_epochs}) is larger than epochs ({self.epochs})")
        if self.freeze_until is not None and self.lora is not None:
            raise ValueError(
                "freeze_until and lora exclude each other, since lora freezes the whole encoder; set one of them"
            )
        return self


class EndToEndConfig(OptimiserConfig):
    """Encoder and aggregator trained together on whole bags, with Adam: a baseline of the paper."""

    learning_rate: Positive = Field(1e-4, description="highest learning rate")
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(0.9, description="decay rate of Adam's first moment")
    start: Literal["pretrained", "scratch"] = Field(
        "pretrained", description="start from pretrained weights or from scratch"
    )
    epochs: Count = Field(50, description="passes over the training bags")
    bags_per_step: Count = Field(1, description="bags per step, over all processes")
    tiles_per_pass: Annotated[int, Field(ge=2)] = Field(
        128, description="largest number of tiles whose activations are in memory at once; gradients are of whole bags"
    )
    views: ViewsConfig = Field(default_factory=ViewsConfig)


class EvaluationConfig(Section):
    """How the frozen models are measured."""

    retrainings: Count = Field(
        5, description="aggregators trained per encoder; results are the mean and sample deviation over them"
    )
    bootstrap: Count = Field(1000, description="number of resamples of the bags for 95% intervals")


class EngineConfig(Section):
    """Device, precision and memory."""

    accelerator: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: a GPU if there is one, else the CPU")
    precision: Literal["auto", "32-true", "bf16-mixed"] = Field(
        "auto", description="auto: bf16-mixed on a GPU, 32-true on a CPU"
    )
    extract_batch_size: Count = Field(512, description="instances per forward pass when features are extracted")
    tiles: Literal["auto", "gpu", "memory", "disk"] = Field(
        "auto", description="where decoded tiles are kept; auto: the first of GPU, host memory and disk that has room"
    )
    tile_folder: str | None = Field(
        None,
        description="folder for tiles that are kept on disk; null: inside the cohort; taken from --set or Python, "
        "never from a recipe, run or study",
    )
    record_steps: bool = Field(
        default=True,
        description="on a GPU: make views in one kernel, and record training steps as CUDA graphs to replay them",
    )
    compile: Literal["auto", "always", "never"] = Field(
        "auto",
        description="compile the network before training; auto: on a GPU, if the training is long enough to gain time",
    )
    loggers: list[Literal["mlflow"]] = Field(
        default_factory=list,
        description="where numbers go besides metrics.jsonl and TensorBoard; MLFLOW_TRACKING_URI names MLflow's server",
    )


class RunConfig(Section):
    """All settings of a run; saved as config.yaml in its folder."""

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
        default_factory=list,
        description="Python files or modules that register aggregators, objectives or pretraining methods",
    )

    @model_validator(mode="after")
    def _consistent(self) -> "RunConfig":
        if self.encoder.side_by_side:
            raise ValueError("encoder.side_by_side is not set by hand; set refine.beside_start")
        reader, seeds = self.refine.reader or self.aggregator, self.refine.aggregator_seeds
        if self.refine.out_of_fold and not (reader.folds and seeds > 1):
            raise ValueError(
                "refine.out_of_fold needs folds=true of the reader and at least two refine.aggregator_seeds"
            )
        return self

    @field_validator("plugins")
    @classmethod
    def _absolute(cls, plugins: list[str]) -> list[str]:
        return [str(Path(plugin).absolute()) if plugin.endswith(".py") else plugin for plugin in plugins]
