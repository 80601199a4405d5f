"""How a model's training cohort was cut, so that new bags are cut the same way; and which bags fit the model."""

import math
from dataclasses import fields
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from its2clr.cohort import CohortInfo, TileFile
from its2clr.cohort.features.feature_cohort import EXTRACTORS
from its2clr.cohort.image_files import check_tile_settings
from its2clr.cohort.slides import SlideSettings
from its2clr.cohort.slides.slide_cohort import check_slide_settings
from its2clr.cohort.synthetic.synthetic_cohort import SOURCE as SYNTHETIC
from its2clr.errors import InputError
from its2clr.units import MicronsPerPixel, TilePixels

Kind = Literal["slides", "images", "tiles", "features"]

SCALE_TOLERANCE = 0.1
"""How much the scale of tiles may differ from the model's; it is never quite equal, since sides are whole pixels."""
_OF_SLIDES = tuple(field.name for field in fields(SlideSettings))
_OF_GROUND_TRUTH = ("min_covered", "classes")
_OF_IMAGES = ("tile_size", "encoding", "quality", "resize", "crop")
_NOT_OF_PIXELS = ("default_mpp", *_OF_GROUND_TRUTH, "skip_glass")


class Tiling(BaseModel):
    """What a bag is for a model, and how it becomes tiles.

    Attributes are fields of the model file.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Kind = Field(description="slides, folders of images, tiles that were packed in an unknown way, or features")
    tile_size: TilePixels = Field(gt=0, description="pixels of the square tiles")
    mpp: MicronsPerPixel | None = Field(description="microns per pixel of the tiles; null where they have no scale")
    settings: dict[str, Any] = Field(description="how slides are tiled or images packed, as in cohort.json")

    @classmethod
    def of_cohort(cls, info: CohortInfo) -> "Tiling":
        """From the settings of a training cohort.

        `default_mpp` is left out: the scale that was assumed there need not be right for other slides.
        """
        found = info.settings
        if info.encoding == "features":
            settings = {"feature_dim": info.feature_dim, EXTRACTORS: found.get(EXTRACTORS, [])}
            return cls(kind="features", tile_size=info.tile_size, mpp=None, settings=settings)
        if found.get("source") == SYNTHETIC:  # drawn tile by tile, and every tile is kept
            whole = SlideSettings(
                mpp=found["mpp"], tile_size=info.tile_size, min_saturation=0.0, encoding=info.encoding, skip_glass=False
            )
            found = {**vars(whole), "classes": []}
        if {"mpp", "min_saturation"} <= found.keys():
            settings = {name: found[name] for name in _OF_SLIDES if name in found and name not in _OF_GROUND_TRUTH}
            settings["default_mpp"] = None
            return cls(kind="slides", tile_size=info.tile_size, mpp=settings["mpp"], settings=settings)
        if {"resize", "encoding"} <= found.keys():
            settings = {name: found[name] for name in _OF_IMAGES if name in found}
            return cls(kind="images", tile_size=info.tile_size, mpp=None, settings=settings)
        return cls(kind="tiles", tile_size=info.tile_size, mpp=None, settings={"encoding": info.encoding})

    def check(self) -> None:
        """Check settings that come from a file.

        Raises:
            InputError: If tiles cannot be made so.
        """
        try:
            if self.kind == "slides":
                check_slide_settings(self.slide_settings())
            elif self.kind == "images":
                check_tile_settings(**{"quality": 95, **self.image_settings()})
        except TypeError as error:
            raise InputError(f"the model's settings for cutting tiles cannot be used ({error})") from error
        if self.settings.get("tile_size", self.tile_size) != self.tile_size:
            raise InputError(f"the model is for tiles of {self.tile_size} px, but its settings cut other ones")

    def slide_settings(self) -> SlideSettings:
        """How slides are tiled."""
        return SlideSettings(**self.settings)

    def image_settings(self) -> dict[str, Any]:
        """How images are packed: arguments of `pack_images`."""
        return dict(self.settings)

    def misfit_of_cohort(self, info: CohortInfo) -> str | None:
        """Why no bag of a cohort fits the model; None if they may."""
        if self.kind == "features" or info.kind == "features":
            return self._misfit_of_features(info)
        if info.tile_size != self.tile_size:
            return (
                f"has tiles of {info.tile_size} px, the model is for {self.tile_size} px; "
                "give the slides or images themselves, or pack them anew"
            )
        return None

    def _misfit_of_features(self, info: CohortInfo) -> str | None:
        dim = self.settings.get("feature_dim")
        if self.kind != "features":
            return "holds features, the model is for tiles; give the slides or images themselves"
        if info.feature_dim is None:
            return f"holds tiles, the model is for features made elsewhere ({dim} per tile); extract these first"
        if info.feature_dim != dim:
            return f"holds {info.feature_dim} features per tile, the model is for {dim}: another encoder made them"
        return None

    def misfit_of_bag(self, tiles: TileFile) -> str | None:
        """Why a packed bag does not fit the model; None if it does."""
        if self.kind == "features":
            return None
        if tiles.tile_size != self.tile_size:
            return f"has tiles of {tiles.tile_size} px, the model is for {self.tile_size} px"
        known = math.isfinite(tiles.mpp)
        if self.kind == "slides":
            assert self.mpp is not None
            if not known:
                return f"has tiles without a scale, the model is for {self.mpp:g} um/px: they were not cut from slides"
            if abs(tiles.mpp / self.mpp - 1) > SCALE_TOLERANCE:
                return f"has tiles of {tiles.mpp:g} um/px, the model is for {self.mpp:g} um/px; tile its slide anew"
        if self.kind == "images" and known:
            return f"was cut from a slide at {tiles.mpp:g} um/px, the model is for ordinary images"
        return None

    def differences(self, info: CohortInfo) -> list[str]:
        """Settings that differ between a cohort of the same kind and the model's own, though its tiles fit."""
        other = Tiling.of_cohort(info)
        if other.kind != self.kind or self.kind == "tiles":
            return []
        if not all(tiling.settings.get(EXTRACTORS, True) for tiling in (self, other)):
            return []  # not all files say what made them
        keys = [key for key in dict.fromkeys([*self.settings, *other.settings]) if key not in (*_NOT_OF_PIXELS, "mpp")]
        return [
            f"{key} is {other.settings.get(key)} there, {self.settings.get(key)} in the model"
            for key in keys
            if other.settings.get(key) != self.settings.get(key)
        ]
