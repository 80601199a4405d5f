"""Work on many machines, or on many processes of one, by Dask."""
