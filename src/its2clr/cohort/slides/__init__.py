"""Whole slides to cohorts: readers, scale, tissue, grid, pictures, and the work spread over Dask workers."""

from its2clr.cohort.slides.build import SlideSummary, pack_slides
from its2clr.cohort.slides.manifest import Slide, SlideManifest, read_slide_manifest
from its2clr.cohort.slides.pack import SlideSettings, TileCounts
from its2clr.cohort.slides.scale import target_mpp
from its2clr.cohort.slides.slide_image import SlideProblem, SlideReader, open_slide

__all__ = [
    "Slide",
    "SlideManifest",
    "SlideProblem",
    "SlideReader",
    "SlideSettings",
    "SlideSummary",
    "TileCounts",
    "open_slide",
    "pack_slides",
    "read_slide_manifest",
    "target_mpp",
]
