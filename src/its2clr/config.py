"""Settings of every stage: pydantic models that refuse unknown keys, recipes, and `key=value` overrides."""

import copy
import difflib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from its2clr.aggregators.config import AggregatorTraining
from its2clr.errors import InputError

Probability = Annotated[float, Field(ge=0.0, le=1.0)]
Share = Annotated[float, Field(gt=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
Count = Annotated[int, Field(ge=1)]
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

    method: Literal["simclr", "moco", "byol", "dino", "bag_labels"] = Field(
        "simclr", description="self-supervised method; bag_labels trains tiles with the label of their bag"
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
        None, description="block of the encoder up to and with which all weights stay as they are; null: none stays"
    )
    lora: LoraSettings | None = Field(
        None, description="train low-rank changes of a transformer's layers instead of its weights; null: the weights"
    )
    selection: Literal["bag_auc", "contrast_auc"] = Field(
        "bag_auc",
        description="validation AUC that decides whether an update is better: of the bags, or by how far a bag's top "
        "instance stands out from its median one",
    )
    tolerance: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        0.0,
        description="how far that AUC may fall below the highest so far for an update still to count as better: with "
        "few validation bags small differences are chance",
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


def recipe_names() -> list[str]:
    """Names of the recipes in the package."""
    return sorted(p.name[:-5] for p in resources.files("its2clr.recipes").iterdir() if p.name.endswith(".yaml"))


def read_recipe(recipe: str | Path) -> dict[str, Any]:
    """Read a recipe of the package by name, or a YAML file of the user's by path."""
    if str(recipe) in recipe_names():
        text = resources.files("its2clr.recipes").joinpath(f"{recipe}.yaml").read_text(encoding="utf-8")
    elif Path(recipe).is_file():
        try:
            text = Path(recipe).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"recipe {recipe}: not a text file ({error})") from error
    else:
        hint = _closest(str(recipe), recipe_names())
        raise InputError(f"no recipe named {str(recipe)!r}{hint}; give one of these or a .yaml file")
    try:
        values = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise InputError(f"recipe {recipe}: not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise InputError(f"recipe {recipe}: expected keys and values, got {type(values).__name__}")
    return values


def resolve_config(
    recipe: str | Path | None = None,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    base: dict[str, Any] | None = None,
) -> RunConfig:
    """Make a checked config from a recipe and overrides.

    Args:
        recipe: Name of a packaged recipe or path of a YAML file; None takes the defaults (the paper's).
        overrides: `["refine.epochs=20", ...]` as typed after `--set`, or a mapping of dotted keys to values.
        base: Settings to start from instead of a recipe.

    Raises:
        InputError: A key is unknown (the closest known one is named) or a value is not allowed.
    """
    values = read_recipe(recipe) if recipe is not None else base or {}
    for key, value in overrides.items() if isinstance(overrides, Mapping) else map(parse_override, overrides):
        _put(values, key.split("."), copy.deepcopy(value))
    return validate_config(values, str(recipe or ("of the run" if base else "defaults")))


def validate_config(values: Mapping[str, Any], where: str) -> RunConfig:
    """Check a mapping of settings; `where` names its origin in the error."""
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        lines = [_explain(item["loc"], item["type"], item["msg"]) for item in error.errors()]
        raise InputError(f"settings ({where}):\n  " + "\n  ".join(lines)) from error


PRECISION = "engine.precision"
"""The one setting of the engine that a run keeps."""


def config_difference(old: RunConfig, new: RunConfig) -> list[str]:
    """Settings that differ, one `key: old -> new` each; how and where it is computed does not count."""
    left, right = flatten(old.model_dump(mode="json")), flatten(new.model_dump(mode="json"))
    keys = sorted(key for key in left.keys() | right.keys() if not key.startswith("engine.") or key == PRECISION)
    return [f"{k}: {left.get(k)!r} -> {right.get(k)!r}" for k in keys if left.get(k) != right.get(k)]


def parse_override(text: str) -> tuple[str, Any]:
    """Split `key=value` as typed after `--set`; the value is read as YAML."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise InputError(f"--set {text!r}: expected key=value, for example refine.epochs=20")
    try:
        return key.strip(), yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise InputError(f"--set {text!r}: the value is not valid YAML: {error}") from error


def _put(values: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        nested = values.setdefault(name, {})
        if not isinstance(nested, dict):
            raise InputError(f"--set {'.'.join(path)}: {name} is a single value, not a section")
        values = nested
    values[path[-1]] = value


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by dotted key."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _explain(location: tuple[int | str, ...], kind: str, message: str) -> str:
    key = ".".join(str(part) for part in location)
    if kind != "extra_forbidden":
        return f"{key}: {message.removeprefix('Value error, ')}"
    model: type[BaseModel] = RunConfig
    for part in location[:-1]:
        annotation = model.model_fields[str(part)].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            break
        model = annotation
    return f"{key}: unknown key{_closest(str(location[-1]), list(model.model_fields))}"


def _closest(name: str, known: list[str]) -> str:
    match = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f", did you mean {match[0]!r}?" if match else f" (known: {', '.join(known)})"
