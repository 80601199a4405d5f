"""The scikit-learn-like face of the package: fit, score, predict_proba, predict_instances, transform."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from its2clr.cohort import Cohort
from its2clr.cohort.given_bags import Bag, identify_bags, make_cohort, passing_cohort, shown_labels
from its2clr.errors import InputError, Its2clrError
from its2clr.files import read_json
from its2clr.plugins import allow_named
from its2clr.wording import did_you_mean

if TYPE_CHECKING:
    from its2clr.run.decisions import Thresholds

Bags = str | Path | Cohort | Sequence[Bag]
"""A cohort or its folder; or a list of bags: folders of images, arrays of tiles (N, S, S, 3) uint8 or of features
(N, D), or bags of a cohort (`cohort[0]`)."""


class ItS2CLR:
    """Learns from bag labels a tile representation, a bag classifier and instance scores.

    It takes cohorts; and, as scikit-learn's estimators do, lists of bags with their labels:
    `cross_val_score(ItS2CLR(run="runs/folds"), cohort, cohort.bags["label"], groups=cohort.bags["group"])`.

    Args:
        recipe: Name of a recipe or a YAML file; None takes `standard`.
        run: Folder of the run. Fitting again with the same settings goes on where it stopped. Fitting on a list of bags
            makes a folder in it for these bags and settings, which is `run_` afterwards.
        overrides: Settings that replace the recipe's, by dotted key: `{"refine.epochs": 20}`.
        verbose: Whether to print progress.

    Example:
        >>> model = ItS2CLR("demo", run="runs/mine").fit("cohorts/mine")  # doctest: +SKIP
        >>> model.predict_proba("cohorts/new")[:, 1]  # doctest: +SKIP
    """

    _fitted: Path | None = None
    classes_ = np.array([0, 1])
    """Labels of bags, in the order of the columns of `predict_proba`."""

    def __init__(
        self,
        recipe: str | Path | None = None,
        *,
        run: str | Path = "runs/fit",
        overrides: Mapping[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        self.recipe = recipe
        self.run = run
        self.overrides = overrides
        self.verbose = verbose

    def __repr__(self) -> str:
        """What it is made of, how far it is, and how good: for a notebook, from small files alone."""
        given = [f"{name}={value!r}" for name, value in self.get_params().items() if value is not None]
        try:
            state = self._state_in_words()
        except (Its2clrError, OSError, ValueError, KeyError, TypeError):
            state = "its folder cannot be read"
        return f"ItS2CLR({', '.join(given)}): {state}"

    def _state_in_words(self) -> str:
        from its2clr.run.results_file import results_rows
        from its2clr.run.saved import read_run_config
        from its2clr.run.scores import RESULTS_FILE

        folder = self.run_
        if folder.is_file():
            return "a trained model, to predict with"
        begun = read_run_config(folder)
        if begun is None:
            return "not fitted yet"
        cohort = Path(begun[1]).name
        if (folder / RESULTS_FILE).is_file():
            rows = results_rows(read_json(folder / RESULTS_FILE))
            shown = "; ".join(f"{name}: bag AUC {bags}, instance AUC {instances}" for name, bags, instances in rows)
            return f"fitted on {cohort} and evaluated on its test bags. {shown}"
        finished = read_json(folder / "state.json").get("stages", {}) if (folder / "state.json").is_file() else {}
        if "aggregate refined" in finished:
            return f"fitted on {cohort}, not evaluated yet"
        return f"being fitted on {cohort}; finished: {', '.join(finished) or 'nothing yet'}"

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The arguments it was made with, as scikit-learn asks for them (`sklearn.base.clone`)."""
        del deep
        return {"recipe": self.recipe, "run": self.run, "overrides": self.overrides, "verbose": self.verbose}

    def set_params(self, **given: Any) -> Self:
        """Change arguments it was made with.

        Raises:
            InputError: There is no such argument.
        """
        for name, value in given.items():
            if name not in self.get_params():
                raise InputError(f"ItS2CLR has no argument {name!r}{did_you_mean(name, self.get_params())}")
            setattr(self, name, value)
        self._forget("_stages", "_deployed", "_fitted")
        return self

    def __sklearn_tags__(self) -> Any:
        """What scikit-learn asks of a classifier."""
        from sklearn.utils import ClassifierTags, Tags, TargetTags

        return Tags("classifier", TargetTags(required=True), classifier_tags=ClassifierTags())

    @property
    def run_(self) -> Path:
        """The folder of the run; one of its own below `run` after fitting on a list of bags."""
        return self._fitted or Path(self.run)

    def _forget(self, *names: str) -> None:
        for name in names:
            self.__dict__.pop(name, None)

    @classmethod
    def from_model(cls, path: str | Path, *, verbose: bool = True) -> Self:
        """A trained model from its file (`model.its2clr`), to predict with.

        Example:
            >>> ItS2CLR.from_model("model.its2clr").predict_instances("cohorts/new")  # doctest: +SKIP
        """
        if not Path(path).is_file():
            raise InputError(f"{path}: there is no such model file")
        return cls(run=path, verbose=verbose)

    def fit(self, cohort: Bags, y: Any = None, groups: Sequence[Any] | None = None) -> Self:
        """Pretrain, aggregate and refine on the training and validation bags; test bags are not touched.

        Args:
            cohort: A cohort or its folder; or a list of bags, which become training and validation bags.
            y: Labels of a list of bags, 0 or 1. Without them a cohort brings its own labels and splits.
            groups: What must not be divided between training and validation, such as the patient of each bag of a list;
                None: as in the cohort that the bags are of.
        """
        from its2clr.run.opening import open_run

        self._forget("_stages", "_fitted")
        self._refuse_model_file()
        if y is None and not isinstance(cohort, str | Path | Cohort):
            raise InputError("a list of bags needs labels: fit(bags, labels)")
        run, folder = Path(self.run), cohort.path if isinstance(cohort, Cohort) else cohort
        if y is not None:
            if isinstance(cohort, str | Path):
                raise InputError("labels go with a list of bags; a cohort's folder holds its own labels")
            bags: list[Bag] = [cohort[number] for number in range(len(cohort))]
            settings = (str(self.recipe), sorted((self.overrides or {}).items()))
            told = None if groups is None else [str(group) for group in groups]
            name = identify_bags(bags, [str(label) for label in y], told, repr(settings))
            run = run / f"bags-{name}"
            folder = run / "bags"
            make_cohort(folder, bags, y, groups)
        elif isinstance(cohort, Cohort) and len(cohort) != len(Cohort.open(cohort.path)):
            raise InputError(
                f"fit takes a whole cohort, got {len(cohort)} bags of {folder}; write the splits you want into a "
                "cohort, or give labels too: fit(bags, labels)"
            )
        allow_named(self.overrides or {})
        stages = open_run(run, str(folder), self.recipe, self.overrides or {}, quiet=not self.verbose)
        stages.fit()
        self._fitted = run
        return self

    def evaluate(self) -> dict[str, Any]:
        """Measure the fitted models on the run's test bags, and write its model file; the content of results.json."""
        from its2clr.predict.model_of_run import export_model
        from its2clr.run.evaluation import evaluate

        results = evaluate(self._stages)
        if self._stages.engine.is_writer:
            export_model(self.run_)
        return results

    def predict_proba(self, cohort: Bags) -> NDArray[np.float64]:
        """Bag probabilities, mean over the retrained aggregators.

        Args:
            cohort: Bags to predict; their labels are not looked at.

        Returns:
            (bags, 2): probability of negative and positive, in the order of `cohort.bags`.
        """
        with self._opened(cohort) as bags:
            positive = self._scores(bags).bag_probability
        return np.stack([1 - positive, positive], axis=1)

    def predict(self, cohort: Bags, threshold: float | None = None) -> NDArray[np.int64]:
        """Bag labels: positive from the threshold on.

        Args:
            cohort: Bags to predict; their labels are not looked at.
            threshold: Least probability of a positive bag; None: the model's own (`thresholds_`).
        """
        least = self.thresholds_.bag if threshold is None else threshold
        return (self.predict_proba(cohort)[:, 1] >= least).astype(np.int64)

    @property
    def thresholds_(self) -> "Thresholds":
        """From which probability on the model calls a bag, and an instance, positive; chosen on validation bags."""
        from its2clr.run.decisions import choose_thresholds, read_thresholds
        from its2clr.run.scores import RESULTS_FILE, Model, Scores

        if self._deployed is not None:
            deployed: Thresholds = self._deployed[0].thresholds
            return deployed
        stages, folder = self._stages, self.run_
        encoder = stages.usual_encoder()
        if stages.run.done("evaluate") is not None:
            model = Model(encoder, stages.config.aggregator.name)
            return read_thresholds(folder, stages.config, read_json(folder / RESULTS_FILE), model)
        validation = stages.context.validation  # as `evaluate` will choose them
        features = stages.features(encoder, validation.cohort.without_labels())
        scores = Scores.of(stages.aggregators(encoder), features)
        return choose_thresholds(stages.config.refine, validation, scores)

    def score(self, cohort: Bags, y: Any = None) -> float:
        """Bag AUC; the bags should be new to the model.

        Args:
            cohort: Bags to predict.
            y: Their labels, 0 or 1; None: those of the cohort.

        Raises:
            InputError: The bags have no labels, or labels of one class.
        """
        from its2clr.evaluation.bags import bag_metrics

        if y is None:
            if not isinstance(cohort, str | Path | Cohort):
                raise InputError("a list of bags needs labels: score(bags, labels)")
            bags = cohort if isinstance(cohort, Cohort) else Cohort.open(cohort)
            if not bags.labels_visible:
                raise InputError(f"{bags.path}: has no labels to score with")
            y = bags.bags["label"]
        labels, probabilities = np.asarray(y), self.predict_proba(cohort)[:, 1]
        if labels.shape != probabilities.shape or not np.isin(labels, (0, 1)).all():
            raise InputError(
                f"expected a label, 0 or 1, for each of {len(probabilities)} bags, got {shown_labels(labels)}"
            )
        return bag_metrics(labels.astype(np.int64), probabilities)["auc"]

    def predict_instances(self, cohort: Bags) -> pd.DataFrame:
        """Instance probabilities with their places.

        Returns:
            One row per instance: `bag_id`, `instance`, `name` (its file), `x`, `y` (level 0) and `probability`.
        """
        with self._opened(cohort) as bags:
            index, coords = bags.bag_index(), bags.coords()
            return pd.DataFrame(
                {
                    "bag_id": bags.bags["bag_id"].to_numpy()[index],
                    "instance": np.arange(len(index)) - bags.offsets()[index],
                    "name": bags.names(),
                    "x": coords[:, 0],
                    "y": coords[:, 1],
                    "probability": self._scores(bags).instance_probability,
                }
            )

    def transform(self, cohort: Bags) -> dict[str, NDArray[np.float32]]:
        """Features (instances, D) of every bag by the encoder that is handed over."""
        with self._opened(cohort) as bags:
            flat = np.concatenate([part.features.cpu().numpy() for part in self._features(bags)])
            parts = np.split(flat, bags.offsets()[1:-1])
            return dict(zip(bags.bags["bag_id"], parts, strict=True))

    @cached_property
    def _stages(self) -> Any:
        from its2clr.run.names import REFINED
        from its2clr.run.opening import open_run

        self._refuse_model_file()
        allow_named(self.overrides or {})
        given = {key: value for key, value in (self.overrides or {}).items() if key.startswith("engine.")}
        stages = open_run(self.run_, overrides=given, quiet=not self.verbose)
        if stages.run.done(f"aggregate {REFINED}") is None:
            raise InputError(f"{self.run_}: this model is not fitted yet; call fit first")
        return stages

    @cached_property
    def _deployed(self) -> Any:
        """Model and engine, where this is a model file and not a run; else None."""
        if not Path(self.run).is_file():
            return None
        from its2clr.predict.inference import open_for_prediction

        return open_for_prediction(self.run, self.overrides or {}, quiet=not self.verbose)

    def _refuse_model_file(self) -> None:
        if self._deployed is not None:
            raise InputError(f"{self.run}: is a trained model, which can predict; training needs a run folder")

    def _features(self, bags: Cohort) -> Any:
        from its2clr.predict.inference import represent_bags

        if self._deployed is not None:
            model, engine = self._deployed
            if len(model.members) > 1:
                raise InputError(
                    f"{self.run}: holds the encoders of {len(model.members)} folds, and features are of one encoder; "
                    "take the run of a fold"
                )
            return [features for (features,) in represent_bags(model, bags, engine)]
        return [self._stages.represent(self._stages.usual_encoder(), bags)]

    def _scores(self, bags: Cohort) -> Any:
        from its2clr.predict.inference import score_bags
        from its2clr.run.scores import Scores

        if self._deployed is not None:
            model, engine = self._deployed
            return score_bags(model, bags, engine)
        return Scores.of(self._stages.aggregators(self._stages.usual_encoder()), self._features(bags)[0])

    @contextmanager
    def _opened(self, cohort: Bags) -> Iterator[Cohort]:
        """The bags as a cohort, without labels."""
        if isinstance(cohort, str | Path):
            yield Cohort.open(cohort).without_labels()
        elif isinstance(cohort, Cohort):
            yield cohort.without_labels()
        else:
            with passing_cohort(list(cohort), self._image_settings()) as bags:
                yield bags

    def _image_settings(self) -> dict[str, Any] | None:
        """How folders of images are packed for this model; None if it takes none."""
        from its2clr.cohort.layout import read_info
        from its2clr.predict.tiling import Tiling

        known = self._deployed[0].tiling if self._deployed is not None else None
        tiling = known or Tiling.of_cohort(read_info(self._stages.run.cohort))
        return tiling.image_settings() if tiling.kind == "images" else None
