"""Triton kernels of the CUDA path, each with the function that launches it.

Kernels take contiguous tensors unless they say otherwise and compute in float32. They run on a GPU, or anywhere under
Triton's interpreter (``TRITON_INTERPRET=1``).

A chain of kernels in a CUDA graph overlaps by programmatic dependent launch: with ``pdl`` a kernel begins while the one
before it still runs, may fetch what no kernel of the chain writes (weights), and waits for that kernel before anything
else. Each kernel of a chain waits, so that waiting for one means waiting for all before it.
"""
