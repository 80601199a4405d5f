"""The stages of a run, each once: pretrain, aggregate, refine or end to end, all between cohort and evaluation.

A stage reads what the one before wrote into the run directory. Nothing here can reach a test label: training sees
`Cohort.without_test()`, and everything else sees `Cohort.without_labels()`.
"""

import time
from functools import cached_property
from pathlib import Path
from urllib.parse import quote

import numpy as np
import torch
from numpy.typing import NDArray

from its2clr.aggregators import create_aggregator
from its2clr.aggregators.config import AggregatorTraining
from its2clr.aggregators.data import BagFeatures
from its2clr.aggregators.trained import EpochRecord, TrainedAggregators
from its2clr.aggregators.training import train_aggregators
from its2clr.baselines import end_to_end as baseline
from its2clr.cohort import Cohort
from its2clr.cohort.features.feature_file import FeatureFile, feature_path, read_feature_file, write_feature_file
from its2clr.encoders.adapter import FeatureAdapter
from its2clr.encoders.encoder import EmbeddingNetwork, check_tile_size
from its2clr.encoders.extraction import extract_features
from its2clr.encoders.foreign import load_weights
from its2clr.encoders.weight_files import read_weights
from its2clr.encoders.weights import create_network, load_network, save_network
from its2clr.engine.devices import Engine
from its2clr.engine.memory import memory_advice, peak_memory, said_peak_memory
from its2clr.errors import InputError
from its2clr.files import hash_files, write_json
from its2clr.pretrain import pretrain
from its2clr.pretrain.validation_checks import remove_candidates as remove_checked
from its2clr.refine.algorithm import refine, remove_candidates
from its2clr.refine.corrections import trusted_instances
from its2clr.refine.finetuning import check_limits
from its2clr.refine.objectives import find_objective
from its2clr.refine.rounds import Bags, aggregator_seeds
from its2clr.run.directory import RunDirectory
from its2clr.seeds import derive_seed
from its2clr.tile_store import TileStore

START = "simclr"
REFINED = "its2clr"
END_TO_END = "end_to_end"
STAGE_OF = {START: "pretrain", REFINED: "refine", END_TO_END: "end_to_end"}
"""The stage that makes each encoder."""
ENCODERS = tuple(STAGE_OF)


class Stages:
    """The stages of one run on one cohort.

    Args:
        run: The run directory; a finished stage is not done again.
        engine: Device and processes.
        write_features: Whether features are written to the run, or only held in memory.
    """

    def __init__(self, run: RunDirectory, engine: Engine, *, write_features: bool = True) -> None:
        self.run, self.engine, self.config = run, engine, run.config
        self._write_features = write_features
        self._held: dict[tuple[str, ...], torch.Tensor] = {}
        self._seen: set[str] = set()
        # A wrong name or option should not wait for the end of pretraining.
        for aggregator in {self.config.aggregator.name: self.config.aggregator, **self._readers()}.values():
            create_aggregator(aggregator.name, 64, **aggregator.options)
        find_objective(self.config.refine.objective)

    @cached_property
    def cohort(self) -> Cohort:
        """Training and validation bags; opened when a stage first needs them, so that predicting does not."""
        cohort = Cohort.open(self.run.cohort)
        if not cohort.is_labelled:
            raise InputError(f"{cohort.path}: this cohort has no labels; it can be predicted, not trained with")
        self.run.check_cohort(cohort.tile_size)
        return cohort.without_test()

    @cached_property
    def train(self) -> Bags:
        """Training bags, decoded once."""
        return Bags(self.cohort.split("train"), self.engine)

    @cached_property
    def validation(self) -> Bags:
        """Validation bags, decoded once."""
        return Bags(self.cohort.split("val"), self.engine)

    @cached_property
    def trusted(self) -> NDArray[np.int8] | None:
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
        if config.start is not None:
            self.engine.say(f"pretrain: taken from {config.start}")
        elif isinstance(network.encoder, FeatureAdapter):
            network.encoder.learn_statistics(self.train.tiles.images)
            self.engine.say("pretrain: the cohort holds features, which are the start")
        elif config.epochs > 0:
            if config.method == "dino" and config.dino.local_size is not None:
                check_tile_size(network.encoder, config.dino.local_size, crops=True)
            self.engine.say(f"pretrain: {config.method} on {len(self.train.tiles)} training tiles")
            with self.run.lock(), memory_advice("pretrain"):
                network = pretrain(
                    network,
                    self.train,
                    self.validation,
                    config,
                    self.config.aggregator,
                    self.engine,
                    self.run,
                    self.config.seed,
                )
        self._save(START, network)
        trained = config.start is None and self.cohort.kind == "tiles"
        self._mark_done("pretrain", epochs=config.epochs if trained else 0)
        remove_checked(self.run)

    def refine(self) -> None:
        """Algorithm 1, from the pretrained encoder."""
        if self._skip("refine"):
            return
        self.pretrain()
        self.engine.say(f"refine: Algorithm 1 for {self.config.refine.epochs} epochs")
        with self.run.lock(), memory_advice("refine"):
            refine(
                load_network(self.run.checkpoint(f"encoder-{START}")),
                self.train,
                self.validation,
                self.config.refine,
                self.config.aggregator,
                self.engine,
                self.run,
                self.config.seed,
                self._instance_labels(),
                self.trusted,
            )
        self._mark_done("refine", epochs=self.config.refine.epochs)
        remove_candidates(self.run)

    def end_to_end(self) -> None:
        """Encoder and aggregator trained together on whole bags: a baseline, beside the refinement."""
        if self._skip("end_to_end"):
            return
        config = self.config.end_to_end
        if self.cohort.kind == "features":
            raise InputError(f"{self.cohort.path}: holds features; end to end needs the tiles themselves")
        if config.start == "pretrained":
            self.pretrain()
            network = load_network(self.run.checkpoint(f"encoder-{START}"))
        else:
            network = self._fresh_network()
        self.engine.say(f"end to end: {len(self.train.labels)} training bags for {config.epochs} epochs")
        with self.run.lock(), memory_advice("end_to_end"):
            baseline.train_end_to_end(
                network,
                self.train,
                self.validation,
                config,
                self.config.aggregator,
                self.engine,
                self.run,
                self.config.seed,
                self._aggregator_path(END_TO_END),
            )
        # Its aggregator first: an encoder that is there without one would get an aggregator trained on frozen features.
        self._mark_done(_aggregate_stage(END_TO_END), retrainings=1)
        self._mark_done("end_to_end", epochs=config.epochs)
        baseline.remove_candidates(self.run)

    def aggregate(self, encoder: str, aggregator: str | None = None) -> TrainedAggregators:
        """Train an aggregator on an encoder's frozen features, once per seed; validation picks each one's epoch.

        Args:
            encoder: Whose features.
            aggregator: Name of another aggregator than the run's, with its default options; trained with the same
                settings.
        """
        config = self._aggregator(aggregator)
        name = None if config is self.config.aggregator else aggregator
        path = self._aggregator_path(encoder, name)
        stage = _aggregate_stage(encoder, name)
        if not self._skip(stage):
            self._require(encoder)
            started = time.perf_counter()
            train = self.features(encoder, self.cohort.split("train"), self.train.labels)
            validation = self.features(encoder, self.cohort.split("val"), self.validation.labels)
            self.engine.on_writer(lambda: self._train_aggregators(stage, config, train, validation).save(path))
            seconds = time.perf_counter() - started
            self._mark_done(stage, retrainings=self.config.evaluation.retrainings, seconds=seconds)
        return TrainedAggregators.load(path)

    def trained(self) -> list[tuple[str, str]]:
        """Every pair of encoder and aggregator that is trained in this run, those with the run's aggregator first."""
        finished = self.run.finished()
        pairs = [
            (encoder, self.config.aggregator.name) for encoder in ENCODERS if _aggregate_stage(encoder) in finished
        ]
        for stage in sorted(finished):
            words = stage.split(" ")
            if words[0] == "aggregate" and len(words) == 3:
                pairs.append((words[1], words[2]))
        return pairs

    def usual_encoder(self) -> str:
        """The refined encoder; of a cohort of features that is not refined, the features themselves."""
        if self.cohort.kind == "features" and self.run.done("refine") is None:
            self.pretrain()
            return START
        return REFINED

    def features(
        self, encoder: str, cohort: Cohort, labels: np.ndarray[tuple[int], np.dtype[np.int64]] | None = None
    ) -> BagFeatures:
        """An encoder's features of a cohort's bags: from the run's feature files, or extracted and written there.

        Args:
            encoder: "simclr", "its2clr" or "end_to_end".
            cohort: Bags to represent; its labels are not looked at.
            labels: Bag labels to attach, where the caller may know them.
        """
        self._require(encoder)
        flat = self._read_or_extract(encoder, cohort) if self._write_features else self._held_features(encoder, cohort)
        known = None if labels is None else torch.from_numpy(labels)
        return BagFeatures(flat.to(self.engine.device), torch.from_numpy(cohort.offsets()), known)

    def represent(self, encoder: str, cohort: Cohort) -> BagFeatures:
        """An encoder's features of any cohort's bags, computed and not kept."""
        self._require(encoder)
        wanted = self.run.tile_size()
        if cohort.kind == "tiles" and cohort.tile_size != wanted:
            raise InputError(
                f"{cohort.path}: tiles of {cohort.tile_size} px, this run was trained on {wanted} px; pack these bags "
                f"with --tile-size {wanted}"
            )
        return BagFeatures(self._extract(encoder, cohort), torch.from_numpy(cohort.offsets()))

    def fit(self) -> None:
        """Every stage of training, in order; a reader of its own is trained on both encoders too."""
        _ = self.trusted  # what is wrong with corrections should not wait
        self.pretrain()
        names = (None, *self._readers())
        for name in names:
            self.aggregate(START, name)
        self.refine()
        for name in names:
            self.aggregate(REFINED, name)

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

    def _aggregator_path(self, encoder: str, name: str | None = None) -> Path:
        return aggregator_path(self.run.path, encoder, name)

    def _train_aggregators(
        self, stage: str, config: AggregatorTraining, train: BagFeatures, validation: BagFeatures
    ) -> TrainedAggregators:
        seeds = aggregator_seeds(self.config.seed, self.config.evaluation.retrainings)
        with self.engine.progress(stage, config.epochs, "epochs") as progress:

            def advance(record: EpochRecord) -> None:
                progress.note(f"validation AUC {np.mean(record['validation_auc']):.3f}")
                progress.advance()

            trained = train_aggregators(config, train, validation, seeds, advance)
        found = ", ".join(f"{auc:.3f}" for auc in trained.validation_auc)
        self.engine.say(f"{stage}: {config.name}, validation bag AUC of {len(seeds)} seeds: {found}")
        return trained

    def _read_or_extract(self, encoder: str, cohort: Cohort) -> torch.Tensor:
        maker = f"{self.config.encoder.name} {encoder} {hash_files(self.run.checkpoint(f'encoder-{encoder}'))}"
        folder = self.run.path / "features" / encoder
        paths = [feature_path(folder, bag_id) for bag_id in cohort.bags["bag_id"]]
        files = [read_feature_file(path) if path.is_file() else None for path in paths]
        if self.engine.broadcast(any(file is None or file.encoder != maker for file in files)):
            flat = self._extract(encoder, cohort)
            if self.engine.is_writer:
                write_features(cohort, flat.cpu().numpy(), folder, maker)
        else:
            flat = torch.from_numpy(np.concatenate([file.features for file in files if file is not None]))
        self.engine.barrier()
        return flat

    def _held_features(self, encoder: str, cohort: Cohort) -> torch.Tensor:
        key = (encoder, *cohort.bags["bag_id"])
        if key not in self._held:
            self._held[key] = self._extract(encoder, cohort)
        return self._held[key]

    def _extract(self, encoder: str, cohort: Cohort) -> torch.Tensor:
        network = load_network(self.run.checkpoint(f"encoder-{encoder}")).to(self.engine.device)
        tiles = self._tiles(cohort)
        return extract_features(network.encoder, tiles, self.engine, self.config.engine.extract_batch_size)

    def _tiles(self, cohort: Cohort) -> TileStore:
        """Tiles of a cohort; those of the training and validation bags are decoded once only."""
        if cohort.path.resolve() == self.run.cohort:
            for bags in (self.train, self.validation):
                if np.array_equal(cohort.bags["bag_id"].to_numpy(dtype=str), bags.bag_ids):
                    return bags.tiles
        return TileStore.from_cohort(cohort.without_labels(), self.engine)

    def _instance_labels(self) -> NDArray[np.float32] | None:
        """Ground truth of the training instances, where the settings ask for finetuning with it; else none is read."""
        if self.config.refine.labels == "pseudo":
            return None
        labels = self.cohort.split("train").instance_labels()
        if (labels < 0).any():
            raise InputError("refine.labels=ground_truth needs the label of every training instance, some are unknown")
        return labels.astype(np.float32)

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

    def _fresh_network(self) -> EmbeddingNetwork:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(self.config.seed, "network"))
            return create_network(self.config)

    def _save(self, encoder: str, network: EmbeddingNetwork) -> None:
        if self.engine.is_writer:
            save_network(self.run.checkpoint(f"encoder-{encoder}"), network, self.config, {"name": encoder})
        self.engine.barrier()

    def _require(self, encoder: str) -> None:
        if encoder not in ENCODERS:
            raise InputError(f"no encoder named {encoder!r}; there are {', '.join(ENCODERS)}")
        stage = STAGE_OF[encoder]
        if self.run.done(stage) is None:
            command = stage.replace("_", "-")
            raise InputError(
                f"{self.run.path}: the {encoder} encoder is not there yet; run `its2clr {command}` on this run first"
            )

    def _mark_done(self, stage: str, **notes: float) -> None:
        self.run.mark_done(stage, **notes, device=self.engine.device_name, peak_memory=peak_memory(self.engine.device))
        self._seen.add(stage)
        if stage in STAGE_OF.values():
            self.engine.say(f"{stage}: {said_peak_memory(self.engine.device)}")

    def _skip(self, stage: str) -> bool:
        if self.engine.broadcast(self.run.done(stage)) is None:
            return False
        if stage not in self._seen:
            self.engine.say(f"{stage}: already done")
        self._seen.add(stage)
        return True


def started_from(start: str) -> Path:
    """The encoder checkpoint that `pretrain.start` names: of a run its pretrained encoder, else the file itself.

    Raises:
        InputError: There is none.
    """
    path = Path(start)
    if path.is_dir():
        path = path / "checkpoints" / f"encoder-{START}.safetensors"
    if not path.is_file():
        raise InputError(
            f"pretrain.start: {path} is not there; name a run that is pretrained, or an encoder checkpoint"
        )
    return path


def aggregator_path(run: Path, encoder: str, name: str | None = None) -> Path:
    """Where a run keeps an encoder's trained aggregators; `name` is of another aggregator than the run's own."""
    return run / "aggregators" / f"{encoder if name is None else f'{encoder}-{quote(name)}'}.safetensors"


def _aggregate_stage(encoder: str, name: str | None = None) -> str:
    return f"aggregate {encoder}" if name is None else f"aggregate {encoder} {name}"


def write_features(
    cohort: Cohort, features: np.ndarray[tuple[int, int], np.dtype[np.float32]], folder: Path, maker: str
) -> None:
    """Write one feature file per bag of a cohort."""
    offsets = cohort.offsets()
    for number, bag_id in enumerate(cohort.bags["bag_id"]):
        tiles = cohort.tile_file(bag_id)
        rows = slice(offsets[number], offsets[number + 1])
        write_feature_file(
            feature_path(folder, tiles.bag_id),
            FeatureFile(features[rows], tiles.coords, maker),
            bag_id=tiles.bag_id,
            tile_size=tiles.tile_size,
            tile_size_level0=tiles.tile_size_level0,
            mpp=tiles.mpp,
            overlap=tiles.overlap,
        )
