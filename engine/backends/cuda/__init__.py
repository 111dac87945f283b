"""The CUDA backend: own kernels, compiled for the card at hand, driven by PyCUDA. Imported only when asked for."""
