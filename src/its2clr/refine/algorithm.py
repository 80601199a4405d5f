"""Algorithm 1: iterative self-paced supervised contrastive learning.

Lay the paper beside this file: the comments name the lines of its Algorithm 1.
"""

import math
import shutil

import torch
from torch import Tensor

from its2clr.aggregators.config import AggregatorTraining
from its2clr.config import RefineConfig
from its2clr.encoders.encoder import EmbeddingNetwork
from its2clr.encoders.weights import save_network
from its2clr.engine.devices import Engine
from its2clr.engine.files import atomic_path
from its2clr.engine.guard import CollapseGuard
from its2clr.engine.rundir import RunDirectory, TrainingState
from its2clr.engine.seeds import numpy_generator
from its2clr.refine.pacing import Pacing
from its2clr.refine.pseudo_labels import partition
from its2clr.refine.rounds import Bags, aggregator_seeds, run_round, save_round
from its2clr.refine.sampling import sample_batches
from its2clr.refine.supcon import supcon_objective
from its2clr.training import Batches, cosine_or_constant, make_optimiser, train_epoch

REFINED = "encoder-its2clr"
"""Checkpoint that refinement leaves: the encoder with the highest validation AUC."""
CANDIDATE = "refine-candidate-{epoch:03d}"
"""Checkpoint of an encoder that was the best when it was measured. The state that names the best of them is saved
after it, so a run that is killed at any moment goes on with the candidate its state speaks of."""


def refine(
    network: EmbeddingNetwork,
    train: Bags,
    validation: Bags,
    config: RefineConfig,
    aggregator: AggregatorTraining,
    engine: Engine,
    run: RunDirectory,
    seed: int,
) -> None:
    """Refine the encoder with pseudo labels from bag labels; goes on from the run's last finished epoch.

    The best encoder by validation bag AUC is left in the run's checkpoints. The start counts too: if no epoch
    improves on it, it is the best.

    Args:
        network: f and psi, pretrained (line 1); trained in place.
        train: Training bags.
        validation: Validation bags.
        config: Settings of Algorithm 1.
        aggregator: How the aggregator is trained in every round.
        engine: Device and processes.
        run: Where rounds, checkpoints and metrics go.
        seed: Seed of aggregators, batches and views.

    Raises:
        TrainingError: The loss became not-a-number or the representation collapsed.
    """
    network.to(engine.device)
    wrapped, optimiser = engine.set_up(network, make_optimiser(network, config))
    state = TrainingState(run, "refine", network, optimiser)
    seeds = aggregator_seeds(seed, config.aggregator_seeds)
    batch_size = engine.divisible_batch_size("refine", config.batch_size)
    steps = config.steps_per_epoch or math.ceil(len(train.tiles) / batch_size)
    start = state.resume()
    guard = CollapseGuard("refine", 2 * batch_size, max(3, config.epochs // 10), state.notes)
    run.forget_after("round", start - 1)
    for epoch in range(start, config.epochs + 1):  # line 2
        if epoch % config.refresh_every == 0 or epoch == config.epochs:
            found = run_round(network.encoder, train, validation, aggregator, seeds, engine)  # lines 3-9
            improved = found.validation_auc >= state.notes.get("best_validation_auc", -math.inf)  # line 11
            replaced = epoch == 0 or (improved and config.iterative)
            if replaced:
                state.tensors["probabilities"] = torch.from_numpy(found.probabilities.mean(axis=0))  # line 13
            if improved:
                state.notes |= {"best_validation_auc": found.validation_auc, "best_epoch": epoch}
            if engine.is_writer:
                if improved:
                    save_network(run.checkpoint(CANDIDATE.format(epoch=epoch)), network, run.config, dict(state.notes))
                notes = {"epoch": epoch, "improved": improved, "pseudo_labels_replaced": replaced}
                save_round(run.path / "rounds" / f"{epoch:03d}", found, train, config.threshold, notes)
            run.log("round", epoch, config.epochs, {"validation_auc": found.validation_auc, "replaced": replaced})
        if epoch == config.epochs:
            break
        batches = epoch_batches(state.tensors["probabilities"], train, config, epoch + 1, steps, batch_size, seed)
        rates = cosine_or_constant(config, epoch, config.epochs, steps)
        result = train_epoch(  # line 16
            wrapped,
            optimiser,
            train.tiles,
            batches,
            supcon_objective(config.temperature),
            config.views,
            engine,
            rates,
            (seed, "refine", epoch + 1),
        )
        guard.check(epoch + 1, result.loss, result.spread)
        run.log("refine", epoch + 1, config.epochs, vars(result))
        state.save(epoch + 1, last=epoch + 1 == config.epochs)
    if engine.is_writer:
        with atomic_path(run.checkpoint(REFINED)) as temporary:
            shutil.copyfile(run.checkpoint(CANDIDATE.format(epoch=state.notes["best_epoch"])), temporary)
    engine.barrier()


def epoch_batches(
    probabilities: Tensor,
    train: Bags,
    config: RefineConfig,
    epoch: int,
    steps: int,
    batch_size: int,
    seed: int,
) -> Batches:
    """The batches of an epoch (1 to T) as section 3.2 samples them.

    Self-paced: in the warm-up, anchors from one clean pool against all pseudo-positives; after it everything from
    the most confident share r. Without self-pacing: every pseudo label from the first epoch on.
    """
    pacing = Pacing(config.initial_ratio, config.final_ratio, config.warmup_epochs, config.epochs)
    warming_up = config.self_paced and epoch <= config.warmup_epochs
    bag = train.bag_of_instance
    pools = partition(
        probabilities.numpy(),
        train.labels[bag],
        config.threshold,
        ratio=pacing.ratio(epoch) if config.self_paced and not warming_up else 1.0,
        bag_ids=bag,
    )
    return sample_batches(
        pools,
        steps,
        batch_size,
        config.positive_fraction,
        numpy_generator(seed, "refine batches", epoch),
        warmup_anchors=config.warmup_anchors if warming_up else None,
    )


def remove_candidates(run: RunDirectory) -> None:
    """Remove what only a refinement that is still going needs."""
    for path in run.path.glob("checkpoints/refine-candidate-*.safetensors") if run.engine.is_writer else ():
        path.unlink()
