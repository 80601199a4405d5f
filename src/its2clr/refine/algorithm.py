"""Algorithm 1: iterative self-paced supervised contrastive learning.

Lay the paper beside this file: the numbers in the comments are the lines of its Algorithm 1. docs/method.md shows both
side by side.
"""

from its2clr.bags import Context
from its2clr.encoders.encoder import EmbeddingNetwork, Encoder
from its2clr.encoders.weights import BestEncoder
from its2clr.refine.finetuning import without_lora
from its2clr.refine.labels import LabelSource
from its2clr.refine.learner import Learner
from its2clr.refine.rounds import Gate, Reader, record_round
from its2clr.refine.sampling import epoch_batches, epoch_pools


def refine(
    network: EmbeddingNetwork,
    context: Context,
    source: LabelSource,
    best: BestEncoder,
    beside: Encoder | None = None,
) -> int:
    """Refine the encoder with instance labels made from bag labels; a stopped run continues after its last saved epoch.

    The first round measures the start: if no later round has a validation AUC as high, the start is the result.

    Args:
        network: f and psi of the start; trained in place.
        context: Settings, bags, device and run.
        source: Where instance labels come from: in the paper, the aggregator.
        best: Keeps the encoder of every round that passes the gate.
        beside: An encoder whose features the reader sees too (`beside_start`); None: as in the paper.

    Returns:
        The epoch of the last round that passed the gate: its encoder is the result.

    Raises:
        TrainingError: The loss became not-a-number, or training is stuck and every remedy was tried.
    """
    config = context.config.refine
    learner, reader = Learner(network, context), Reader(context, beside)  # 1: f is the start
    gate = Gate(learner.progress, config.gate)
    for epoch in learner.epochs():  # 2
        labels = learner.progress.labels
        if epoch % config.refresh_every == 0 or epoch == config.epochs:
            reading = reader.read(reader.extract(network.encoder), epoch)  # 3 to 9; no features are left over
            passed = gate.passes(reading)  # 10, 11
            if passed or config.relabel == "always":
                labels = source.labels(reading.labels, labels)  # 12, 13
            if passed:
                best.keep(epoch, without_lora(network))
            record_round(context, reading, source, labels, improved=passed)
        if epoch < config.epochs:
            pools = source.pools(epoch_pools(labels, context.train, config, epoch + 1))  # section 3.2
            batches = epoch_batches(pools, config, epoch + 1, learner.steps, learner.batch_size, context.seed)
            learner.train(batches, epoch + 1, labels)  # 15, 16
    return gate.best_epoch  # 17
