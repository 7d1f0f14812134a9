"""The CUDA path: device, graphs, the fused decoder, attention and sampling over :mod:`twostroke.engine.kernels`.

Imported only where a runner is built for a GPU.
"""
