"""The model file: everything that a prediction needs, as JSON and safetensors in one archive, `model.its2clr`.

```
model.json                 what it is: format, encoder, aggregators, tiling, calibration, threshold, how good it was
encoder.safetensors        weights of the encoder; the projector is for training only and left out
aggregators.safetensors    weights of every retrained aggregator, stacked; the prediction is the mean of theirs
```

A model of several folds holds `encoder-2.safetensors` and `aggregators-2.safetensors`, and so on, beside them; its
prediction is the mean over all.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from its2clr.aggregators.base import aggregator_names
from its2clr.aggregators.trained import TrainedAggregators
from its2clr.archive import read_archive, write_archive
from its2clr.config import EncoderConfig, OptionValue
from its2clr.encoders.encoder import FOREIGN_WEIGHTS, Encoder, create_encoder
from its2clr.engine.bounded import bounded_by
from its2clr.engine.checkpoint import load_module
from its2clr.errors import InputError
from its2clr.predict.calibration import Calibration
from its2clr.predict.tiling import Tiling
from its2clr.run.decisions import USUAL_INSTANCE_THRESHOLD, Thresholds
from its2clr.version import __version__

MODEL_FILE = "model.its2clr"
FORMAT, FORMAT_OF_SEVERAL = 1, 2
MOST_MEMBERS = 20
_JSON, _ENCODER, _AGGREGATORS = "model.json", "encoder.safetensors", "aggregators.safetensors"
_ADVICE = "copy it again, or make it anew with `its2clr evaluate RUN`"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class AggregatorPart(_Part):
    """The trained aggregators, without their weights."""

    name: str
    options: dict[str, OptionValue]
    feature_dim: int = Field(gt=0)
    seeds: tuple[int, ...] = Field(min_length=1)
    validation_auc: tuple[float, ...]
    best_epoch: tuple[int, ...]


class MemberPart(_Part):
    """One of the further pairs in a model of several, without its weights."""

    encoder: EncoderConfig
    aggregator: AggregatorPart


class ModelDescription(_Part):
    """What `model.json` holds."""

    format: int = Field(default=FORMAT, description="version of the format")
    its2clr: str = Field(default=__version__, description="package version that wrote it")
    method: str = Field(description="how the encoder was trained, in the paper's words")
    label: str = Field(description="what the bags are classified by: the label column of the training cohort")
    encoder_name: str = Field(description="which encoder of the run: refined, end_to_end or start")
    encoder: EncoderConfig = Field(description="how to build the encoder")
    aggregator: AggregatorPart = Field(description="the aggregators whose mean is the prediction")
    more: tuple[MemberPart, ...] = Field(
        default=(), max_length=MOST_MEMBERS - 1, description="further encoders with their aggregators, of other folds"
    )
    plugins: tuple[str, ...] = Field(default=(), description="files or modules that the run imported")
    precision: Literal["auto", "32-true", "bf16-mixed"] = Field("auto", description="engine.precision of the run")
    tiling: Tiling = Field(description="what bags it takes, and how they become tiles")
    threshold: FiniteFloat = Field(description="least probability of a positive bag; chosen on validation bags")
    instance_threshold: FiniteFloat = Field(
        USUAL_INSTANCE_THRESHOLD, description="least probability of a positive instance; see `run.decisions`"
    )
    calibration: dict[str, FiniteFloat | int | None] = Field(description="fitted on validation bags; see the guide")
    metrics: dict[str, Any] = Field(default_factory=dict, description="how good it was on the run's test bags")
    cohort: dict[str, Any] = Field(default_factory=dict, description="numbers of bags it was trained and tested on")
    seen: dict[str, list[str]] = Field(
        default_factory=dict, description="short hashes of its own bags' tiles, by split"
    )
    sha256: dict[str, str] = Field(default_factory=dict, description="of the files of weights")


class Member(NamedTuple):
    """What turns tiles into scores: a feature extractor, and aggregators trained on its features."""

    encoder: Encoder
    aggregators: TrainedAggregators


@dataclass(frozen=True, eq=False)
class TrainedModel:
    """A model that can predict; make one with `load_model` or from a run with `model_of_run`.

    Attributes:
        description: What `model.json` holds.
        members: Whose mean is the prediction; one, or one per fold.
    """

    description: ModelDescription
    members: tuple[Member, ...]

    @property
    def calibration(self) -> Calibration:
        """The calibration of bag probabilities."""
        return Calibration(**self.description.calibration)  # type: ignore[arg-type]

    @property
    def thresholds(self) -> Thresholds:
        """From which probability on it calls a bag, and an instance, positive."""
        return Thresholds(self.description.threshold, self.description.instance_threshold)

    @property
    def tiling(self) -> Tiling:
        """What bags it takes."""
        return self.description.tiling

    @property
    def fingerprint(self) -> str:
        """Short hash of description and weights: the same for equal models."""
        return hashlib.sha256(_encoded(self.description)).hexdigest()[:16]


def join_model(description: ModelDescription, *members: Member) -> TrainedModel:
    """Put a model together; its description then names the weights it belongs to."""
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in _parts(members).items()}
    version = FORMAT if len(members) == 1 else FORMAT_OF_SEVERAL
    return TrainedModel(description.model_copy(update={"sha256": digests, "format": version}), members)


def save_model(model: TrainedModel, path: str | Path) -> Path:
    """Write a model file; it appears whole, and equal models give equal bytes."""
    path = Path(path)
    write_archive(path, {_JSON: _encoded(model.description), **_parts(model.members)})
    return path


def _parts(members: Sequence[Member]) -> dict[str, bytes]:
    """The files of weights."""
    return {
        name: _weights(state)
        for number, member in enumerate(members, start=1)
        for name, state in zip(
            _names(number), (member.encoder.state_dict(), dict(member.aggregators.state)), strict=True
        )
    }


def _names(number: int) -> tuple[str, str]:
    """Names of the files of a member's weights."""
    if number == 1:
        return _ENCODER, _AGGREGATORS
    return f"encoder-{number}.safetensors", f"aggregators-{number}.safetensors"


def load_model(path: str | Path) -> TrainedModel:
    """Read a model file.

    Only JSON and safetensors are read, from this file alone: nothing is fetched, unpacked or unpickled.

    Raises:
        InputError: If it is missing, damaged, of a newer format, or needs a plugin that is not imported.
    """
    path = Path(path)
    more = tuple(name for number in range(2, MOST_MEMBERS + 1) for name in _names(number))
    parts = read_archive(path, (_JSON, *_names(1)), _ADVICE, more)
    description = _described(parts[_JSON], path)
    described = (MemberPart(encoder=description.encoder, aggregator=description.aggregator), *description.more)
    wanted = {name for number in range(1, len(described) + 1) for name in _names(number)}
    if wanted != set(parts) - {_JSON}:
        raise InputError(f"{path}: model.json describes other files of weights than there are; {_ADVICE}")
    for name in wanted:
        if hashlib.sha256(parts[name]).hexdigest() != description.sha256.get(name):
            raise InputError(f"{path}: {name} does not belong to its model.json; {_ADVICE}")
    members = []
    for number, part in enumerate(described, start=1):
        encoder_weights, aggregator_weights = (_tensors(parts[name], path) for name in _names(number))
        _require_aggregator(part.aggregator.name, description.plugins, path)
        with bounded_by(encoder_weights, path):
            encoder = create_encoder(part.encoder)
        load_module(encoder, encoder_weights, path)
        members.append(Member(encoder, _aggregators(part.aggregator, aggregator_weights, path)))
    return TrainedModel(description, tuple(members))


def _encoded(description: ModelDescription) -> bytes:
    unused = set() if description.more else {"more"}
    return (
        json.dumps(description.model_dump(mode="json", exclude=unused), indent=2, ensure_ascii=False) + "\n"
    ).encode()


def _described(content: bytes, path: Path) -> ModelDescription:
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: model.json cannot be read ({error}); {_ADVICE}") from error
    version = document.get("format") if isinstance(document, dict) else None
    if not isinstance(version, int):
        raise InputError(f"{path}: model.json does not say its format; {_ADVICE}")
    if version not in (FORMAT, FORMAT_OF_SEVERAL):
        made = document.get("its2clr", "another version")
        raise InputError(
            f"{path}: the model has format {version}, this version of its2clr ({__version__}) reads up to "
            f"{FORMAT_OF_SEVERAL}; install the version it was made with ({made}) or a newer one"
        )
    try:
        description = ModelDescription.model_validate(document)
        Calibration(**description.calibration)  # type: ignore[arg-type]
        description.tiling.check()
    except (ValidationError, InputError, TypeError) as error:
        first = str(error).partition("\n")[0]
        raise InputError(f"{path}: model.json does not describe a model ({first}); {_ADVICE}") from error
    for encoder in (description.encoder, *(member.encoder for member in description.more)):
        named = [option for option in FOREIGN_WEIGHTS if option in encoder.options]
        if encoder.pretrained or encoder.weights is not None or named:
            listed = ", ".join(named) or "pretrained"
            raise InputError(f"{path}: model.json asks for weights from elsewhere ({listed}), which are never read")
    return description


def _require_aggregator(name: str, plugins: Sequence[str], path: Path) -> None:
    if name in aggregator_names() or name.startswith("torchmil:"):  # torchmil says itself what is missing
        return
    advice = "it was trained with another version of its2clr"
    if plugins:
        listed = ", ".join(plugins)
        advice = f"the run imported {listed}: give that here too, as --set plugins=[{listed}]"
    raise InputError(f"{path}: needs the aggregator {name!r}, which is not known here; {advice}")


def _aggregators(part: AggregatorPart, state: dict[str, Tensor], path: Path) -> TrainedAggregators:
    aggregators = TrainedAggregators(
        name=part.name,
        options=part.options,
        feature_dim=part.feature_dim,
        seeds=part.seeds,
        validation_auc=np.array(part.validation_auc),
        best_epoch=np.array(part.best_epoch, dtype=np.int64),
        history=[],
        state=state,
    )
    with bounded_by(state, path):
        expected = aggregators.template().state_dict()
    shapes = {name: (len(part.seeds), *tensor.shape) for name, tensor in expected.items()}
    if {name: tuple(tensor.shape) for name, tensor in state.items()} != shapes:
        raise InputError(f"{path}: the weights do not fit the aggregator {part.name!r}; {_ADVICE}")
    return aggregators


def _tensors(content: bytes, path: Path) -> dict[str, Tensor]:
    try:
        return load(content)
    except (SafetensorError, ValueError, KeyError) as error:
        raise InputError(f"{path}: the weights cannot be read ({error}); {_ADVICE}") from error


def _weights(tensors: dict[str, Tensor]) -> bytes:
    return save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in sorted(tensors.items())})
