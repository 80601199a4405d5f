"""End-to-end training: encoder and aggregator together, on whole bags (section 4.3, appendix on end-to-end training).

The activations of a whole bag do not fit into memory. So the encoder's forward pass over a bag is divided into passes
of `tiles_per_pass` tiles; their activations are dropped, and computed again in the backward pass. The gradient is that
of the whole bag. Batch norm, if the encoder has it, uses the statistics of one pass, and a pass never crosses bags. So
the result for a bag depends neither on the other bags of the step nor on the number of processes.
"""

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from its2clr.aggregators.base import Aggregator
from its2clr.aggregators.stacked import build, evaluate, stack
from its2clr.aggregators.trained import EpochRecord, TrainedAggregators
from its2clr.aggregators.training import aggregator_seeds, draw_bags, positive_weight
from its2clr.bags import Bags, Context
from its2clr.config import AggregatorTraining
from its2clr.encoders.encoder import EmbeddingNetwork, Encoder
from its2clr.encoders.extraction import extract_bags
from its2clr.encoders.weights import BestEncoder
from its2clr.engine.devices import Engine
from its2clr.engine.training_state import TrainingState
from its2clr.errors import InputError, TrainingError
from its2clr.seeds import numpy_generator
from its2clr.training import cosine_or_constant
from its2clr.views.maker import ViewMaker

AGGREGATOR = "aggregator"
"""Name of the file part that holds the aggregator of a best epoch."""


@dataclass
class Progress:
    """The best epoch so far, by validation AUC, then by validation loss; saved with the network."""

    best_epoch: int | None = None
    validation_auc: float = -math.inf
    validation_loss: float = math.inf

    def improved_by(self, epoch: int, auc: float, loss: float) -> bool:
        """Whether this epoch is better; if so, it becomes the best."""
        better = auc > self.validation_auc or (auc == self.validation_auc and loss < self.validation_loss)
        if better:
            self.best_epoch, self.validation_auc, self.validation_loss = epoch, auc, loss
        return better


class EndToEndNetwork(nn.Module):
    """Encoder and aggregator as one: tiles of some bags in, loss and bag logits out.

    Args:
        encoder: f.
        aggregator: g.
        tiles_per_pass: Largest number of tiles whose activations are in memory at once.
    """

    def __init__(self, encoder: Encoder, aggregator: Aggregator, tiles_per_pass: int) -> None:
        super().__init__()
        self.encoder, self.aggregator = encoder, aggregator
        self.tiles_per_pass = tiles_per_pass

    def forward(self, images: Tensor, sizes: list[int], labels: Tensor) -> tuple[Tensor, Tensor]:
        """Loss over the bags, and their logits (B,).

        Args:
            images: (N, 3, S, S) tiles, bag after bag.
            sizes: Number of tiles of each bag.
            labels: (B,) bag labels.
        """
        again = len(images) > self.tiles_per_pass
        features = [self.represent(bag, again=again) for bag in torch.split(images, sizes)]
        padded = pad_sequence(features, batch_first=True)  # (B, K, D)
        lengths = torch.tensor(sizes, device=padded.device)
        mask = torch.arange(padded.shape[1], device=padded.device) < lengths[:, None]
        with torch.autocast(padded.device.type, enabled=False):  # float32, as in training on frozen features
            output = self.aggregator(padded.to(torch.promote_types(padded.dtype, torch.float32)), mask)
            return self.aggregator.loss(output, labels), output.bag_logit

    def represent(self, images: Tensor, *, again: bool) -> Tensor:
        """Features (K, D) of one bag, in passes of equal size; `again` computes activations again for the gradient."""
        passes = images.tensor_split(math.ceil(len(images) / self.tiles_per_pass))
        if not again:
            return torch.cat([self._encode(part) for part in passes])
        contexts = self._contexts
        return torch.cat([checkpoint(self._encode, part, use_reentrant=False, context_fn=contexts) for part in passes])

    def _encode(self, images: Tensor) -> Tensor:
        training = self.encoder.training
        self.encoder.train(training and len(images) > 1)  # batch norm cannot use the statistics of one tile
        try:
            features: Tensor = self.encoder(images)
        finally:
            self.encoder.train(training)
        return features

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return nullcontext(), kept_statistics(self.encoder)


@contextmanager
def kept_statistics(network: nn.Module) -> Iterator[None]:
    """Keep the running statistics of batch norm: the second computation of a pass must not count again."""
    norms = [module for module in network.modules() if isinstance(module, _BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    counts = [None if norm.num_batches_tracked is None else norm.num_batches_tracked.clone() for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum, count in zip(norms, momenta, counts, strict=True):
            norm.momentum = momentum
            if count is not None and norm.num_batches_tracked is not None:
                norm.num_batches_tracked.copy_(count)


def train_end_to_end(network: EmbeddingNetwork, context: Context, best: BestEncoder) -> int:
    """Train encoder and aggregator on whole bags; a stopped run continues after its last saved epoch.

    Args:
        network: Encoder to start from, with a projector that is not used.
        context: Settings, bags, device and run.
        best: Keeps encoder and aggregator (part "aggregator") of every epoch that was the best so far.

    Returns:
        The epoch with the highest validation AUC; of equal ones, the one with the lowest validation loss.

    Raises:
        InputError: The bags of a step cannot be divided evenly among the processes, or a step has too many.
        TrainingError: The loss became not-a-number.
    """
    config, aggregator, engine = context.config.end_to_end, context.config.aggregator, context.engine
    bags = len(context.train.labels)
    if config.bags_per_step % engine.world_size or bags < config.bags_per_step:
        raise InputError(
            f"end_to_end.bags_per_step={config.bags_per_step} must be a multiple of the {engine.world_size} "
            f"process(es) and at most the {bags} training bags"
        )
    aggregator_seed = aggregator_seeds(context.seed, 1)[0]
    head = build(aggregator.name, aggregator.options, network.encoder.feature_dim, aggregator_seed)
    head.positive_weight = positive_weight(aggregator, context.train.labels)
    model = EndToEndNetwork(network.encoder, head, config.tiles_per_pass).to(engine.device)
    adam = torch.optim.Adam(
        model.parameters(), lr=config.learning_rate, betas=(config.momentum, 0.999), weight_decay=config.weight_decay
    )
    wrapped, optimiser = engine.set_up(model, adam, shared_batch_norm=False)
    progress = Progress()
    state = TrainingState(context.run, "end_to_end", model, optimiser, progress)
    for epoch in range(state.resume(), config.epochs):
        generator = numpy_generator(context.seed, "end to end bags", epoch)
        order = draw_bags(context.train.labels, generator, aggregator.balanced)
        result = _train_epoch(wrapped, optimiser, context, order, epoch)
        result |= _validate(model, context.validation, engine)
        if progress.improved_by(epoch + 1, result["validation_auc"], result["validation_loss"]):
            best.keep(epoch + 1, network)
            if engine.is_writer:
                trained = _as_trained(model, aggregator, aggregator_seed, result, epoch + 1)
                trained.save(best.path(epoch + 1, AGGREGATOR))
        context.run.log("end_to_end", epoch + 1, config.epochs, result)
        state.save(epoch + 1, last=epoch + 1 == config.epochs)
    assert progress.best_epoch is not None
    return progress.best_epoch


def _train_epoch(
    network: nn.Module, optimiser: torch.optim.Optimizer, context: Context, order: NDArray[np.int64], epoch: int
) -> dict[str, float]:
    """One pass over the bags: mean loss, AUC of the predictions made during training, seconds."""
    config, engine, train = context.config.end_to_end, context.engine, context.train
    order = order[: len(order) // config.bags_per_step * config.bags_per_step]
    steps = torch.from_numpy(order).view(-1, config.bags_per_step)
    rates = cosine_or_constant(config, epoch, config.epochs, len(steps))
    labels = torch.from_numpy(train.labels)
    losses: list[Tensor] = []
    scores = torch.zeros(len(order), device=engine.device)  # in the order of the draws
    keys = (context.seed, "end_to_end", epoch + 1, engine.rank)
    make_view = ViewMaker(config.views, engine.device, *keys)
    started = time.perf_counter()
    network.train()
    with (
        engine.own_random_state(*keys, "network"),
        engine.progress(f"end to end {epoch + 1}", len(steps)) as progress,
    ):
        for step, bags in enumerate(steps):
            mine = bags[engine.rank :: engine.world_size]
            rows = [torch.arange(train.offsets[bag], train.offsets[bag + 1]) for bag in mine.tolist()]
            images = make_view(train.tiles.gather(torch.cat(rows), engine.device))
            for group in optimiser.param_groups:
                group["lr"] = rates[step]
            loss, logits = network(images, [len(part) for part in rows], labels[mine].to(engine.device))
            optimiser.zero_grad()
            engine.backward(loss)
            optimiser.step()
            losses.append(loss.detach())
            places = torch.arange(len(bags))[engine.rank :: engine.world_size] + step * config.bags_per_step
            scores[places.to(engine.device)] = logits.detach().float()
            progress.advance()
    seconds = time.perf_counter() - started
    engine.share_buffers(network)
    loss_mean = engine.mean_over_processes(torch.stack(losses).mean())[0]
    if not math.isfinite(loss_mean):
        raise TrainingError(
            f"end_to_end: the loss became {loss_mean} in epoch {epoch + 1}. Lower end_to_end.learning_rate; with bf16, "
            "try engine.precision=32-true. New settings need a new run folder."
        )
    found = engine.sum_over_processes(scores).cpu().numpy()
    auc = float(roc_auc_score(train.labels[order], found)) if 0 < train.labels[order].mean() < 1 else math.nan
    return {"loss": loss_mean, "train_auc": auc, "bags_seen": float((epoch + 1) * len(order)), "seconds": seconds}


def _validate(model: EndToEndNetwork, validation: Bags, engine: Engine) -> dict[str, float]:
    """Bag AUC and loss on the validation bags."""
    features = extract_bags(model.encoder, validation, engine)
    state, _ = stack([model.aggregator], engine.device)
    output = evaluate(model.aggregator, state, features)
    assert output.loss is not None
    auc = float(roc_auc_score(validation.labels, output.bag_logit[0].cpu().numpy()))
    return {"validation_auc": auc, "validation_loss": float(output.loss[0])}


def _as_trained(
    model: EndToEndNetwork, config: AggregatorTraining, seed: int, result: dict[str, float], epoch: int
) -> TrainedAggregators:
    record = EpochRecord(
        epoch=epoch,
        learning_rate=0.0,
        train_loss=[result["loss"]],
        validation_loss=[result["validation_loss"]],
        validation_auc=[result["validation_auc"]],
    )
    state, _ = stack([model.aggregator], torch.device("cpu"))
    return TrainedAggregators(
        name=config.name,
        options=dict(config.options),
        feature_dim=model.encoder.feature_dim,
        seeds=(seed,),
        validation_auc=np.array([result["validation_auc"]]),
        best_epoch=np.array([epoch]),
        history=[record],
        state=state,
    )
