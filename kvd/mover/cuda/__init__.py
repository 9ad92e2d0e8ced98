"""The mover's copies between a GPU's memory and the pool. Imports CuPy: only movers load it."""
