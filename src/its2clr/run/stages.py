"""The stages of a run, each once: pretrain, aggregate, refine or end to end, all between cohort and evaluation.

A stage reads what the one before wrote into the run directory. Nothing here can reach a test label: training sees
`Cohort.without_test()`, and everything else sees `Cohort.without_labels()`.
"""

import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from its2clr.aggregators import create_aggregator
from its2clr.aggregators.trained import EpochRecord, TrainedAggregators
from its2clr.aggregators.training import aggregator_seeds, train_aggregators
from its2clr.bag_features import BagFeatures
from its2clr.bags import Bags, Context
from its2clr.baselines.end_to_end import AGGREGATOR, train_end_to_end
from its2clr.cohort import Cohort
from its2clr.config import AggregatorTraining
from its2clr.encoders.adapter import FeatureAdapter
from its2clr.encoders.encoder import EmbeddingNetwork, Encoder, SideBySide, check_tile_size
from its2clr.encoders.foreign import load_weights
from its2clr.encoders.weight_files import read_weights
from its2clr.encoders.weights import BestEncoder, create_network, load_network, save_network
from its2clr.engine.checkpoint import load_checkpoint
from its2clr.engine.devices import Engine
from its2clr.engine.memory import memory_advice, peak_memory, said_peak_memory
from its2clr.engine.training_state import BestCheckpoints
from its2clr.errors import InputError
from its2clr.files import read_metrics, write_json
from its2clr.pretrain.loop import pretrain
from its2clr.pretrain.method import METHODS
from its2clr.refine.algorithm import refine
from its2clr.refine.corrections import trusted_instances
from its2clr.refine.finetuning import check_limits
from its2clr.refine.labels import CorrectedLabels, GroundTruth, LabelSource, PseudoLabels, Trusted
from its2clr.refine.objectives import OBJECTIVES
from its2clr.run.directory import RunDirectory
from its2clr.run.features import RunFeatures, require_encoder
from its2clr.run.handover import HANDOVER_FILE, compare, preferred_encoders, said
from its2clr.run.names import ENCODERS, END_TO_END, REFINED, STAGE_OF, START, aggregator_path, encoder_file
from its2clr.run.scores import Model
from its2clr.run.work_plan import announce
from its2clr.seeds import derive_seed


class Stages:
    """The stages of one run on one cohort.

    Args:
        run: The run directory; a finished stage is not done again.
        engine: Device and processes.
        write_features: Whether features are written to the run, or only held in memory.

    Raises:
        InputError: The settings name an aggregator, objective or pretraining method that does not exist: that should
            not wait for the end of pretraining.
    """

    def __init__(self, run: RunDirectory, engine: Engine, *, write_features: bool = True) -> None:
        self.run, self.engine, self.config = run, engine, run.config
        self._features = RunFeatures(run, engine, write=write_features)
        self._seen: set[str] = set()
        self.ask: Callable[[str], bool] | None = None
        """Asks the person at the terminal before very long work; None where nobody is there."""
        for aggregator in {self.config.aggregator.name: self.config.aggregator, **self._readers()}.values():
            create_aggregator(aggregator.name, 64, **aggregator.options)
        OBJECTIVES.find(self.config.refine.objective)
        METHODS.find(self.config.pretrain.method)

    @cached_property
    def cohort(self) -> Cohort:
        """Training and validation bags; opened when a stage first needs them, so that predicting does not."""
        cohort = Cohort.open(self.run.cohort)
        if not cohort.is_labelled:
            raise InputError(f"{cohort.path}: this cohort has no labels; it can be predicted, not trained with")
        self.run.check_cohort(cohort)
        self._check_given()
        self.run.open_loggers()
        return cohort.without_test()

    def _check_given(self) -> None:
        """Refuse files that the settings name if they have changed since the run began."""
        if self.config.pretrain.start is not None:
            self.run.check_given("pretrain.start", _start_file(self.config.pretrain.start))
        for setting, path in (
            ("encoder.weights", self.config.encoder.weights),
            ("refine.corrections", self.config.refine.corrections),
        ):
            if path is not None:
                self.run.check_given(setting, Path(path))

    @cached_property
    def context(self) -> Context:
        """What every training works on; tiles are decoded once, when they are first needed."""
        train, validation = (Bags(self.cohort.split(name), self.engine) for name in ("train", "val"))
        self._features.reuse(train, validation)
        return Context(self.config, train, validation, self.engine, self.run)

    @cached_property
    def trusted(self) -> Trusted | None:
        """What a person marked of the training instances, where the settings name corrections; see `corrections`."""
        if self.config.refine.corrections is None:
            return None
        folder, train = Path(self.config.refine.corrections), self.cohort.split("train")
        return self.engine.on_writer(lambda: trusted_instances(folder, train, self.run.path, self.engine.say))

    def pretrain(self) -> None:
        """Self-supervised start of the encoder, on the training tiles; or the start that the settings name."""
        if self._skip("pretrain"):
            return
        config = self.config.pretrain
        network = self._start_network()
        self._check_fits(network)
        best = BestEncoder(self.run, "pretrain", self.config)
        if config.start is not None:
            self.engine.say(f"pretrain: taken from {config.start}")
        elif isinstance(network.encoder, FeatureAdapter):
            network.encoder.learn_statistics(self.context.train.tiles.images)
            self.engine.say("pretrain: the cohort holds features, which are the start")
        elif config.epochs > 0:
            if config.method == "dino" and config.dino.local_size is not None:
                check_tile_size(network.encoder, config.dino.local_size, crops=True)
            self.engine.say(f"pretrain: {config.method} on {len(self.context.train.tiles)} training tiles")
            with self.run.lock(), memory_advice("pretrain"):
                network = pretrain(network, self.context, best)
        if self.engine.is_writer:
            save_network(encoder_file(self.run.path, START), network, self.config, {"name": START})
        self.engine.barrier()
        trained = config.start is None and self.cohort.kind == "tiles"
        self._mark_done("pretrain", encoder_file(self.run.path, START), epochs=config.epochs if trained else 0)
        best.remove()

    def refine(self) -> None:
        """Algorithm 1, from the start."""
        if self._skip("refine"):
            return
        self.pretrain()
        self.engine.say(f"refine: Algorithm 1 for {self.config.refine.epochs} epochs")
        best = BestEncoder(self.run, "refine", self.config)
        with self.run.lock(), memory_advice("refine"):
            network, beside = self._to_refine()
            epoch = refine(network, self.context, self._label_source(), best, beside)
            best.hand_over(epoch, encoder_file(self.run.path, REFINED))
            if beside is not None and self.engine.is_writer:
                self._put_beside(beside.cpu(), encoder_file(self.run.path, REFINED))
            self.engine.barrier()
        self._mark_done("refine", encoder_file(self.run.path, REFINED), epochs=self.config.refine.epochs)
        best.remove()

    def end_to_end(self) -> None:
        """Encoder and aggregator trained together on whole bags: a baseline, beside the refinement."""
        if self._skip("end_to_end"):
            return
        config = self.config.end_to_end
        if self.cohort.kind == "features":
            raise InputError(f"{self.cohort.path}: holds features; end to end needs the tiles themselves")
        if config.start == "pretrained":
            self.pretrain()
            network = load_network(encoder_file(self.run.path, START))
        else:
            network = self._fresh_network()
        self.engine.say(f"end to end: {len(self.context.train.labels)} training bags for {config.epochs} epochs")
        best = BestEncoder(self.run, "end_to_end", self.config)
        with self.run.lock(), memory_advice("end_to_end"):
            epoch = train_end_to_end(network, self.context, best)
            best.hand_over(epoch, encoder_file(self.run.path, END_TO_END))
            best.hand_over(epoch, aggregator_path(self.run.path, END_TO_END), AGGREGATOR)
        # Its aggregator first: an encoder that is there without one would get an aggregator trained on frozen features.
        self._mark_done(_aggregate_stage(END_TO_END), aggregator_path(self.run.path, END_TO_END), retrainings=1)
        self._mark_done("end_to_end", encoder_file(self.run.path, END_TO_END), epochs=config.epochs)
        best.remove()

    def aggregate(self, encoder: str, aggregator: str | None = None) -> TrainedAggregators:
        """Train an aggregator on an encoder's frozen features, once per seed; validation picks each one's epoch.

        Args:
            encoder: Whose features.
            aggregator: Name of another aggregator than the run's, with its default options; trained with the same
                settings.
        """
        config = self._aggregator(aggregator)
        name = None if config is self.config.aggregator else aggregator
        path = aggregator_path(self.run.path, encoder, name)
        stage = _aggregate_stage(encoder, name)
        if not self._skip(stage):
            started = time.perf_counter()
            train, validation = (
                self.features(encoder, bags.cohort, bags.labels)
                for bags in (self.context.train, self.context.validation)
            )
            self.engine.on_writer(lambda: self._train_aggregators(stage, config, train, validation).save(path))
            seconds = time.perf_counter() - started
            self._mark_done(stage, path, retrainings=self.config.evaluation.retrainings, seconds=seconds)
        return TrainedAggregators.load(path)

    def aggregators(self, encoder: str) -> TrainedAggregators:
        """The trained aggregators of an encoder, to predict with: the run's cohort is not looked at.

        Raises:
            InputError: They are not trained yet, or are not those that were trained.
        """
        stage = _aggregate_stage(encoder)
        if self.run.done(stage) is None:
            raise InputError(f"{self.run.path}: no aggregator is trained on the {encoder} encoder yet")
        self.run.check_written(stage)
        return TrainedAggregators.load(aggregator_path(self.run.path, encoder))

    def trained(self) -> list[Model]:
        """Every pair of encoder and aggregator that is trained in this run, those with the run's aggregator first."""
        finished = self.run.finished()
        own = self.config.aggregator.name
        models = [Model(encoder, own) for encoder in ENCODERS if _aggregate_stage(encoder) in finished]
        for stage in sorted(finished):
            words = stage.split(" ")
            if words[0] == "aggregate" and len(words) == 3:
                models.append(Model(words[1], words[2]))
        return models

    def usual_encoder(self) -> str:
        """The encoder that is handed over; of a cohort of features that is not refined, the features themselves."""
        if self.run.done("refine") is None and self.cohort.kind == "features":
            self.pretrain()
            return START
        return preferred_encoders(self.run.path)[0]

    def features(self, encoder: str, cohort: Cohort, labels: NDArray[np.int64] | None = None) -> BagFeatures:
        """An encoder's features of the bags of the run's cohort, kept; see `RunFeatures.of`.

        Raises:
            InputError: There is no such encoder (yet), or the cohort is not the one that it was trained on.
        """
        _ = self.cohort  # is refused if it has changed
        return self._features.of(encoder, cohort, labels)

    def represent(self, encoder: str, cohort: Cohort) -> BagFeatures:
        """An encoder's features of any cohort's bags, computed and not kept."""
        require_encoder(self.run, encoder)
        wanted = self.run.tile_size()
        if cohort.kind == "tiles" and cohort.tile_size != wanted:
            raise InputError(
                f"{cohort.path}: tiles of {cohort.tile_size} px, this run was trained on {wanted} px; pack these bags "
                f"with --tile-size {wanted}"
            )
        return BagFeatures(self._features.extract(encoder, cohort), torch.from_numpy(cohort.offsets()))

    def fit(self) -> None:
        """Every stage of training, in order; a reader of its own is trained on both encoders too."""
        _ = self.trusted  # what is wrong with corrections should not wait
        self._announce()
        self.pretrain()
        names = (None, *self._readers())
        for name in names:
            self.aggregate(START, name)
        self.refine()
        for name in names:
            self.aggregate(REFINED, name)
        self.engine.work = None
        self.hand_over()

    def _announce(self) -> None:
        """Say what a fit is going to do, and count it."""
        if self.run.done("refine") is None:
            trained = self.cohort.kind == "tiles" and self.config.pretrain.start is None
            pretrains = trained and self.run.done("pretrain") is None
            self.engine.work = announce(self.context, read_metrics(self.run.path), self.ask, pretrains=pretrains)

    def hand_over(self) -> None:
        """Decide which encoder the run hands over, where the settings leave that to the validation bags."""
        if self.config.refine.hand_over == "refined" or self._skip("hand over"):
            return
        bags = self.context.validation

        def scores(encoder: str) -> NDArray[np.float64]:
            found = self.aggregate(encoder).predict(self.features(encoder, bags.cohort))
            mean: NDArray[np.float64] = found.bag_probability.mean(axis=0)
            return mean

        found = compare(bags.labels, scores(START), scores(REFINED), bags.groups)
        if self.engine.is_writer:
            write_json(self.run.path / HANDOVER_FILE, found)
        self.engine.say(f"hand over: {said(found)}")
        self._mark_done("hand over", self.run.path / HANDOVER_FILE, encoder=found["encoder"])

    def _readers(self) -> dict[str, AggregatorTraining]:
        """The aggregator that makes the pseudo labels, where it is another than the run's."""
        reader = self.config.refine.reader
        return {} if reader is None or reader.name == self.config.aggregator.name else {reader.name: reader}

    def _aggregator(self, name: str | None) -> AggregatorTraining:
        own = self.config.aggregator
        if name is None or name == own.name:
            return own
        reader = self.config.refine.reader
        if reader is not None and name == reader.name:
            return reader
        create_aggregator(name, 64)
        return own.model_copy(update={"name": name, "options": {}})

    def _train_aggregators(
        self, stage: str, config: AggregatorTraining, train: BagFeatures, validation: BagFeatures
    ) -> TrainedAggregators:
        seeds = aggregator_seeds(self.config.seed, self.config.evaluation.retrainings)
        with self.engine.progress(stage, config.epochs, "epochs") as progress:

            def advance(record: EpochRecord) -> None:
                progress.note(f"validation AUC {np.mean(record['validation_auc']):.3f}")
                progress.reach(record["epoch"], config.epochs)

            trained = train_aggregators(config, train, validation, seeds, advance)
        found = ", ".join(f"{auc:.3f}" for auc in trained.validation_auc)
        self.engine.say(f"{stage}: {config.name}, validation bag AUC of {len(seeds)} seeds: {found}")
        return trained

    def _label_source(self) -> LabelSource:
        """Where refinement takes instance labels from; true ones are read only where the settings ask for them."""
        config = self.config.refine
        if config.labels == "ground_truth":
            truth = self.cohort.split("train").instance_labels()
            if (truth < 0).any():
                raise InputError(
                    "refine.labels=ground_truth needs the label of every training instance, some are unknown"
                )
            return GroundTruth(truth, config.threshold)
        if self.trusted is not None:
            return CorrectedLabels(self.trusted, iterative=config.iterative)
        return PseudoLabels(iterative=config.iterative)

    def _to_refine(self) -> tuple[EmbeddingNetwork, Encoder | None]:
        """The network that refinement trains, and the start that its features stand beside, if the settings say so."""
        path = encoder_file(self.run.path, START)
        network = load_network(path)
        if isinstance(network.encoder, FeatureAdapter):  # it is residual: what the start knew is in its features
            return network, None
        beside = load_network(path).encoder
        if isinstance(network.encoder.backbone, SideBySide):  # refined before: its own start stays
            beside, trained = network.encoder.parted()
            network = EmbeddingNetwork(trained, network.head)
        return network, beside if self.config.refine.beside_start else None

    def _put_beside(self, start: Encoder, path: Path) -> None:
        """Make the encoder in a file one with the start beside it."""
        refined, (_, state) = load_network(path), load_checkpoint(path)
        network = EmbeddingNetwork(refined.encoder.beside(start), refined.head)
        save_network(path, network, self.config, state["notes"])

    def _start_network(self) -> EmbeddingNetwork:
        """The network that pretraining begins with: of another run, fresh, or with the weights that settings name."""
        if self.config.pretrain.start is not None:
            return load_network(started_from(self.config.pretrain.start))
        network = self._fresh_network()
        # What pretraining has saved already holds the weights; the file need not be there any more.
        if self.config.encoder.weights is not None and not self.run.checkpoint("pretrain").is_file():
            report = load_weights(network, read_weights(self.config.encoder.weights), self.config.encoder)
            for line in report.lines():
                self.engine.say(line)
            if self.engine.is_writer:
                write_json(self.run.path / "weights.json", report.as_dict())
        return network

    def _fresh_network(self) -> EmbeddingNetwork:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(self.config.seed, "network"))
            return create_network(self.config)

    def _check_fits(self, network: EmbeddingNetwork) -> None:
        """Refuse an encoder that cannot take what the cohort holds."""
        limits = self.config.refine.freeze_until, self.config.refine.lora
        if self.cohort.kind == "tiles":
            check_tile_size(network.encoder, self.cohort.tile_size)
            check_limits(network.encoder, self.config.refine)
        elif any(limit is not None for limit in limits):
            raise InputError("refine.freeze_until and refine.lora are for encoders of tiles; the cohort holds features")
        elif not isinstance(network.encoder, FeatureAdapter):
            raise InputError("pretrain.start: an encoder of tiles, but the cohort holds features")
        elif (network.encoder.feature_dim,) != self.cohort.instance_shape:
            raise InputError(
                f"pretrain.start: an adapter of {network.encoder.feature_dim} features, the cohort has "
                f"{self.cohort.instance_shape[0]}"
            )

    def _mark_done(self, stage: str, *files: Path, **notes: Any) -> None:
        notes |= {"device": self.engine.device_name, "peak_memory": peak_memory(self.engine.device)}
        self.run.mark_done(stage, files, **notes)
        self._seen.add(stage)
        if stage in STAGE_OF.values():
            self.engine.say(f"{stage}: {said_peak_memory(self.engine.device)}")

    def _skip(self, stage: str) -> bool:
        """Whether a stage is done; what it was made from, and what it made, must still be there as it was."""
        if self.engine.broadcast(self.run.done(stage)) is None:
            return False
        if self.run.cohort.is_dir():
            _ = self.cohort
        self.run.check_written(stage)
        BestCheckpoints(self.run, stage).remove()  # a process that was killed just after the stage left them
        if stage not in self._seen:
            self.engine.say(f"{stage}: already done")
        self._seen.add(stage)
        return True


def started_from(start: str) -> Path:
    """The encoder checkpoint that `pretrain.start` names: of a run its start, else the file itself.

    Raises:
        InputError: There is none.
    """
    path = _start_file(start)
    if not path.is_file():
        raise InputError(
            f"pretrain.start: {path} is not there; name a run that is pretrained, or an encoder checkpoint"
        )
    return path


def _start_file(start: str) -> Path:
    path = Path(start)
    return encoder_file(path, START) if path.is_dir() else path


def _aggregate_stage(encoder: str, name: str | None = None) -> str:
    return f"aggregate {encoder}" if name is None else f"aggregate {encoder} {name}"
