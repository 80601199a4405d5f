"""Random views of a batch of tiles, made on the device and drawn separately for every tile."""

import torch
import torch.nn.functional as F
from torch import Tensor

from its2clr.config import ViewsConfig
from its2clr.seeds import derive_seed, numpy_generator
from its2clr.views.drawn import COLOURS, draw
from its2clr.views.plain import apply


class ViewMaker:
    """Makes random views of every tile of a batch: crop, flips, colour jitter, grayscale, blur.

    As in torchvision's ColorJitter, the colour operations come in random order. The fused kernel draws an order for
    every view; otherwise the batch has one order. Everything else is drawn for every view.

    Args:
        config: Strengths and probabilities.
        device: Device of the tiles.
        keys: Names the random draws are derived from, e.g. the run's seed, stage, epoch and process.
        fused: Whether to make the views with the kernel of `its2clr.views.fused`; needs a GPU.
    """

    def __init__(self, config: ViewsConfig, device: torch.device, *keys: int | str, fused: bool = False) -> None:
        self.config = config
        self.fused = fused
        self.generator = torch.Generator(device)
        self.reseed(*keys)

    def reseed(self, *keys: int | str) -> None:
        """Derive the next draws from these keys."""
        self.generator.manual_seed(derive_seed("views", *keys))
        self._host = numpy_generator("view order", *keys)

    def __call__(self, images: Tensor) -> Tensor:
        """Views (B, 3, H, W), float32 in [0, 1], of tiles (B, 3, H, W), uint8 or float in [0, 1]."""
        return self._plain(self.config, images)

    def pair(self, tiles: Tensor, rows: Tensor) -> Tensor:
        """Two views of each of some tiles, (2B, 3, H, W), first views first.

        Args:
            tiles: (N, 3, H, W) uint8.
            rows: (B,) which tiles, on the same device.
        """
        return self._several(self.config, tiles, rows, 2)

    def crops(self, tiles: Tensor, rows: Tensor, count: int, scale: tuple[float, float], size: int | None) -> Tensor:
        """Views of small parts of the tiles: (count * B, 3, size, size), the first view of every tile first.

        Args:
            tiles: (N, 3, H, W) uint8.
            rows: (B,) which tiles, on the same device.
            count: Number of views of each tile.
            scale: Smallest and largest area of a part, as a share of the tile's area.
            size: Side of the views in pixels; None: the side of the tile.
        """
        views = self._several(self.config.model_copy(update={"crop_scale": scale}), tiles, rows, count)
        return views if size is None else F.interpolate(views, (size, size), mode="bilinear", antialias=True)

    def _several(self, config: ViewsConfig, tiles: Tensor, rows: Tensor, count: int) -> Tensor:
        if not self.fused:
            images = tiles.index_select(0, rows)
            return torch.cat([self._plain(config, images) for _ in range(count)])
        from its2clr.views.fused import fused_views

        repeated = rows.repeat(count)
        drawn = draw(config, len(repeated), tiles.shape[-1], self.generator, tiles.device)
        return fused_views(tiles, repeated, drawn)

    def _plain(self, config: ViewsConfig, images: Tensor) -> Tensor:
        order = torch.from_numpy(self._host.permutation(len(COLOURS)).astype("int32"))[None]
        return apply(images, draw(config, len(images), images.shape[-1], self.generator, images.device, order))
