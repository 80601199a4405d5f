"""DINO: a student matches the centred, sharpened output of a teacher, its momentum copy, for other views of a tile."""

import math
import warnings

import torch
from lightly.loss import DINOLoss
from lightly.models.modules.heads import DINOProjectionHead
from lightly.models.utils import deactivate_requires_grad, update_momentum
from torch import Tensor, nn

from its2clr.config import DinoConfig, PretrainConfig
from its2clr.encoders.encoder import EmbeddingNetwork
from its2clr.pretrain.method import Method, frozen_copy, register_pretraining, rising_momentum
from its2clr.training import LocalCrops

MOMENTUM = 0.996


class Dino(nn.Module):
    """Student, teacher and centre.

    Args:
        network: Its encoder becomes the student's; its projector is not used.
        config: Head, temperatures, local views.

    Attributes:
        epoch: Number of the epoch from 0; the loop sets it.
    """

    def __init__(self, network: EmbeddingNetwork, config: DinoConfig) -> None:
        super().__init__()
        self._config = config
        self.epoch = 0
        self.student = EmbeddingNetwork(network.encoder, self._head(network.encoder.feature_dim))
        self.teacher = EmbeddingNetwork(frozen_copy(network.encoder), self._head(network.encoder.feature_dim))
        self.teacher.head.load_state_dict(self.student.head.state_dict())  # deepcopy fails on its weight norm
        deactivate_requires_grad(self.teacher)
        self.cross_entropy = DINOLoss(
            config.output_dim,
            warmup_teacher_temp=config.first_teacher_temperature,
            teacher_temp=config.teacher_temperature,
            warmup_teacher_temp_epochs=config.teacher_warmup_epochs,
            student_temp=config.student_temperature,
            center_momentum=config.centre_momentum,
        )

    @property
    def teacher_temperature(self) -> float:
        """Temperature of the teacher in this epoch."""
        warmup = self.cross_entropy.teacher_temp_schedule
        return float(warmup[self.epoch]) if self.epoch < len(warmup) else self._config.teacher_temperature

    def begin_epoch(self, epoch: int) -> None:
        """Temperature and frozen prototypes depend on the epoch."""
        self.epoch = epoch

    def edit_gradients(self) -> None:
        """Drop the gradients of the prototypes as long as they are frozen."""
        head = self.student.head
        assert isinstance(head, DINOProjectionHead)
        head.cancel_last_layer_gradients(self.epoch)

    def forward(self, images: Tensor, crops: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Features (2B, D) of the student; its outputs for all views over the teacher's for the first two."""
        features, outputs = self.student(images)
        outputs = [outputs] if crops is None else [outputs, self.student(crops)[1]]
        with torch.no_grad():
            _, targets = self.teacher(images)
        return features, torch.cat([*outputs, targets])

    def loss(self, embeddings: Tensor, labels: Tensor | None, anchors: Tensor | None) -> Tensor:  # noqa: ARG002
        """Cross-entropy of every pair of different views; also moves the centre, by the mean over all processes."""
        views = embeddings.chunk(4 + self._config.local_views)
        targets = [view.detach() for view in views[-2:]]
        loss: Tensor = self.cross_entropy(targets, list(views[:-2]), self.teacher_temperature)
        return loss

    def spread(self, embeddings: Tensor) -> float:
        """How much the teacher's output depends on the tile, from 0 to 1.

        It is the root of the mutual information of output and tile, divided by the largest possible value; so it is
        linear in small differences of the outputs. It is 0 if every tile gives the same distribution, flat or one
        prototype: the two ways in which DINO collapses.
        """
        teacher = torch.cat(embeddings.chunk(4 + self._config.local_views)[-2:]).float()
        logits = (teacher - self.cross_entropy.center[0]) / self.teacher_temperature
        shares = logits.softmax(dim=1)
        together = shares.mean(0)
        information = torch.special.entr(together).sum() - torch.special.entr(shares).sum(1).mean()
        return math.sqrt(max(float(information), 0.0) / math.log(min(shares.shape)))

    def _head(self, feature_dim: int) -> DINOProjectionHead:
        config = self._config
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # lightly uses torch's older weight norm
            return DINOProjectionHead(
                feature_dim,
                config.hidden_dim,
                config.bottleneck_dim,
                config.output_dim,
                freeze_last_layer=config.frozen_epochs,
                norm_last_layer=config.norm_last_layer,
            )


@register_pretraining("dino")
def dino(network: EmbeddingNetwork, config: PretrainConfig) -> Method:
    """DINO; the teacher's encoder is kept. Its head cannot be the projector of the refinement, which is a fresh one."""
    learner = Dino(network, config.dino)
    momentum = MOMENTUM if config.momentum_encoder is None else config.momentum_encoder

    def update(step: int, steps: int) -> None:
        update_momentum(learner.student, learner.teacher, rising_momentum(momentum, step, steps))

    local = config.dino
    crops = LocalCrops(local.local_views, local.local_scale, local.local_size) if local.local_views else None
    kept = EmbeddingNetwork(learner.teacher.encoder, network.head)
    return Method(
        learner,
        learner.loss,
        kept,
        update,
        crops,
        spread=learner.spread,
        records=False,
        begin_epoch=learner.begin_epoch,
        edit_gradients=learner.edit_gradients,
    )
