"""The local web app that walks through a run: bags, slides, heat, rounds and instances."""
