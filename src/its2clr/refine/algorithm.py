"""Algorithm 1: iterative self-paced supervised contrastive learning.

Lay the paper beside this file: the comments name the lines of its Algorithm 1.
"""

import math
import shutil

import numpy as np
import torch
from numpy.typing import NDArray

from its2clr.aggregators.config import AggregatorTraining
from its2clr.config import RefineConfig
from its2clr.encoders.encoder import EmbeddingNetwork
from its2clr.encoders.weights import save_network
from its2clr.engine.devices import Engine
from its2clr.engine.guard import CollapseGuard
from its2clr.files import atomic_path
from its2clr.refine.finetuning import limit_training, without_lora
from its2clr.refine.objectives import find_objective
from its2clr.refine.pseudo_labels import Pools, trust, with_trusted
from its2clr.refine.rounds import Bags, aggregator_seeds, run_round, save_round
from its2clr.refine.sampling import epoch_batches, epoch_pools
from its2clr.run.directory import RunDirectory, TrainingState
from its2clr.training import TrainingStep, cosine_or_constant, train_epoch

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
    truth: NDArray[np.float32] | None = None,
    trusted: NDArray[np.int8] | None = None,
) -> None:
    """Refine the encoder with pseudo labels from bag labels; goes on from the run's last finished epoch.

    The best encoder by the validation AUC that selects (the last one within the tolerance of the highest) is left in
    the run's checkpoints. The start counts too: if no epoch improves on it, it is the best.

    Args:
        network: f and psi, pretrained (line 1); trained in place.
        train: Training bags.
        validation: Validation bags.
        config: Settings of Algorithm 1.
        aggregator: How the aggregator is trained in every round.
        engine: Device and processes.
        run: Where rounds, checkpoints and metrics go.
        seed: Seed of aggregators, batches and views.
        truth: Instance labels to use instead of pseudo labels: ground-truth finetuning, an upper bound.
        trusted: What a person said of training instances: 1, 0, or -1 for nothing.

    Raises:
        TrainingError: The loss became not-a-number or the representation collapsed.
    """
    limit_training(network.encoder, config, seed)
    prepared = find_objective(config.objective)(network, config, seed)
    learner = prepared.network
    reader = config.reader or aggregator
    seeds = aggregator_seeds(seed, config.aggregator_seeds)
    batch_size = engine.divisible_batch_size("refine", config.batch_size)
    steps = config.steps_per_epoch or math.ceil(len(train.tiles) / batch_size)
    step = TrainingStep(learner, train.tiles, prepared.loss, config, batch_size, config.epochs * steps, engine)
    state = TrainingState(run, "refine", learner, step.optimiser)
    start = state.resume()
    guard = CollapseGuard("refine", 2 * batch_size, max(3, config.epochs // 10), state.notes)
    run.forget_after("round", start - 1)

    def pools_of(epoch: int) -> Pools:
        threshold = state.notes.get("threshold", config.threshold)
        return with_trusted(epoch_pools(state.tensors["probabilities"], threshold, train, config, epoch), trusted)

    for epoch in range(start, config.epochs + 1):  # line 2
        if epoch % config.refresh_every == 0 or epoch == config.epochs:
            found = run_round(network.encoder, train, validation, reader, config, seeds, engine)  # lines 3-9
            state.notes["highest_auc"] = max(found.selection_auc, state.notes.get("highest_auc", -math.inf))
            improved = found.selection_auc >= state.notes["highest_auc"] - config.tolerance  # line 11
            replaced = truth is None and (epoch == 0 or (improved and config.iterative))
            if truth is not None:
                state.tensors["probabilities"] = torch.from_numpy(truth)
            elif replaced:
                labels = trust(found.probabilities.mean(axis=0), trusted)  # line 13
                state.tensors["probabilities"] = torch.from_numpy(labels)
                state.notes["threshold"] = found.threshold
            if improved:
                state.notes |= {"best_validation_auc": found.validation_auc, "best_epoch": epoch}
            if engine.is_writer:
                if improved:
                    path = run.checkpoint(CANDIDATE.format(epoch=epoch))
                    save_network(path, without_lora(network), run.config, dict(state.notes))
                notes = {"epoch": epoch, "improved": improved, "pseudo_labels_replaced": replaced}
                pools = pools_of(min(epoch + 1, config.epochs))
                save_round(run.path / "rounds" / f"{epoch:03d}", found, train, pools, notes, trusted)
            logged = {"validation_auc": found.validation_auc, "replaced": replaced, "seconds": found.seconds}
            run.log("round", epoch, config.epochs, logged)
        if epoch == config.epochs:
            break
        batches = epoch_batches(pools_of(epoch + 1), config, epoch + 1, steps, batch_size, seed)
        rates = cosine_or_constant(config, epoch, config.epochs, steps)
        result = train_epoch(step, batches, rates, (seed, "refine", epoch + 1))  # line 16
        if prepared.contrastive:
            guard.check(epoch + 1, result.loss, result.spread)
        run.log("refine", epoch + 1, config.epochs, vars(result))
        state.save(epoch + 1, last=epoch + 1 == config.epochs)
    if engine.is_writer:
        with atomic_path(run.checkpoint(REFINED)) as temporary:
            shutil.copyfile(run.checkpoint(CANDIDATE.format(epoch=state.notes["best_epoch"])), temporary)
    engine.barrier()


def remove_candidates(run: RunDirectory) -> None:
    """Remove what only a refinement that is still going needs."""
    for path in run.path.glob("checkpoints/refine-candidate-*.safetensors") if run.engine.is_writer else ():
        path.unlink()
