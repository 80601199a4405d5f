"""its2clr: instance representations, bag predictions and maps from bag labels alone."""

__version__ = "0.1.0"
