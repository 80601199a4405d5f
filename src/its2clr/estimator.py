"""The scikit-learn-like face of the package: fit, score, predict_proba, predict_instances, transform."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from its2clr.cohort import Cohort
from its2clr.errors import InputError, Its2clrError
from its2clr.files import read_json
from its2clr.plugins import allow_named
from its2clr.wording import did_you_mean

if TYPE_CHECKING:
    from its2clr.run.decisions import Thresholds


class ItS2CLR:
    """Learns from bag labels a tile representation, a bag classifier and instance scores.

    Args:
        recipe: Name of a recipe or a YAML file; None takes `standard`.
        run: Folder of the run. Fitting again with the same settings goes on where it stopped.
        overrides: Settings that replace the recipe's, by dotted key: `{"refine.epochs": 20}`.
        verbose: Whether to print progress.

    Example:
        >>> model = ItS2CLR("demo", run="runs/mine").fit("cohorts/mine")  # doctest: +SKIP
        >>> model.predict_proba("cohorts/new")[:, 1]  # doctest: +SKIP
    """

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

        folder = Path(self.run)
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
        self.__dict__.pop("_stages", None)
        self.__dict__.pop("_deployed", None)
        return self

    @classmethod
    def from_model(cls, path: str | Path, *, verbose: bool = True) -> Self:
        """A trained model from its file (`model.its2clr`), to predict with.

        Example:
            >>> ItS2CLR.from_model("model.its2clr").predict_instances("cohorts/new")  # doctest: +SKIP
        """
        if not Path(path).is_file():
            raise InputError(f"{path}: there is no such model file")
        return cls(run=path, verbose=verbose)

    def fit(self, cohort: str | Path | Cohort) -> Self:
        """Pretrain, aggregate and refine on the training and validation bags; test bags are not touched.

        Args:
            cohort: A cohort or its folder.
        """
        from its2clr.run.opening import open_run

        self._refuse_model_file()
        folder = cohort.path if isinstance(cohort, Cohort) else cohort
        if isinstance(cohort, Cohort) and len(cohort) != len(Cohort.open(folder)):
            raise InputError(
                f"fit takes a whole cohort, got {len(cohort)} bags of {folder}; write the splits you want into a cohort"
            )
        allow_named(self.overrides or {})
        stages = open_run(self.run, folder, self.recipe, self.overrides or {}, quiet=not self.verbose)
        stages.fit()
        self.__dict__.pop("_stages", None)
        return self

    def evaluate(self) -> dict[str, Any]:
        """Measure the fitted models on the run's test bags, and write its model file; the content of results.json."""
        from its2clr.predict.model_of_run import export_model
        from its2clr.run.evaluation import evaluate

        results = evaluate(self._stages)
        if self._stages.engine.is_writer:
            export_model(self.run)
        return results

    def predict_proba(self, cohort: str | Path | Cohort) -> NDArray[np.float64]:
        """Bag probabilities, mean over the retrained aggregators.

        Args:
            cohort: Bags to predict; their labels are not looked at.

        Returns:
            (bags, 2): probability of negative and positive, in the order of `cohort.bags`.
        """
        positive = self._scores(_opened(cohort)).bag_probability
        return np.stack([1 - positive, positive], axis=1)

    def predict(self, cohort: str | Path | Cohort, threshold: float | None = None) -> NDArray[np.int64]:
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
        stages, folder = self._stages, Path(self.run)
        encoder = stages.usual_encoder()
        if stages.run.done("evaluate") is not None:
            model = Model(encoder, stages.config.aggregator.name)
            return read_thresholds(folder, stages.config, read_json(folder / RESULTS_FILE), model)
        validation = stages.context.validation  # as `evaluate` will choose them
        features = stages.features(encoder, validation.cohort.without_labels())
        scores = Scores.of(stages.aggregators(encoder), features)
        return choose_thresholds(stages.config.refine, validation, scores)

    def score(self, cohort: str | Path | Cohort) -> float:
        """Bag AUC on the bags of a cohort with labels; they should be new to the model.

        Raises:
            InputError: The cohort has no labels, or labels of one class.
        """
        from its2clr.evaluation.bags import bag_metrics

        bags = cohort if isinstance(cohort, Cohort) else Cohort.open(cohort)
        if not bags.labels_visible:
            raise InputError(f"{bags.path}: has no labels to score with")
        return bag_metrics(bags.bags["label"].to_numpy(dtype=np.int64), self.predict_proba(bags)[:, 1])["auc"]

    def predict_instances(self, cohort: str | Path | Cohort) -> pd.DataFrame:
        """Instance probabilities with their places.

        Returns:
            One row per instance: `bag_id`, `instance`, `name` (its file), `x`, `y` (level 0) and `probability`.
        """
        bags = _opened(cohort)
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

    def transform(self, cohort: str | Path | Cohort) -> dict[str, NDArray[np.float32]]:
        """Features (instances, D) of every bag by the encoder that is handed over."""
        bags = _opened(cohort)
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
        stages = open_run(self.run, overrides=given, quiet=not self.verbose)
        if stages.run.done(f"aggregate {REFINED}") is None:
            raise InputError(f"{self.run}: this model is not fitted yet; call fit first")
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
            return represent_bags(model, bags, engine)
        return [self._stages.represent(self._stages.usual_encoder(), bags)]

    def _scores(self, bags: Cohort) -> Any:
        from its2clr.predict.inference import score_bags
        from its2clr.run.scores import Scores

        if self._deployed is not None:
            model, engine = self._deployed
            return score_bags(model, bags, engine)
        return Scores.of(self._stages.aggregators(self._stages.usual_encoder()), self._features(bags)[0])


def _opened(cohort: str | Path | Cohort) -> Cohort:
    return (cohort if isinstance(cohort, Cohort) else Cohort.open(cohort)).without_labels()
