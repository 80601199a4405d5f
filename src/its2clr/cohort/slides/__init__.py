"""Whole slides to cohorts: opened, laid out in a grid, tested for tissue, annotated, and spread over processes."""

from its2clr.cohort.slides.one_slide import SlideSettings, TileCounts
from its2clr.cohort.slides.slide_cohort import SlideSummary, pack_slides, target_mpp
from its2clr.cohort.slides.slide_image import SlideImage, SlideProblem, open_named_slide, open_slide
from its2clr.cohort.slides.slide_manifest import Slide, SlideManifest, read_slide_manifest

__all__ = [
    "Slide",
    "SlideImage",
    "SlideManifest",
    "SlideProblem",
    "SlideSettings",
    "SlideSummary",
    "TileCounts",
    "open_named_slide",
    "open_slide",
    "pack_slides",
    "read_slide_manifest",
    "target_mpp",
]
