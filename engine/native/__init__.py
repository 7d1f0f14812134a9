"""Kernels in C for a CPU, compiled on the machine that runs them; where they can't be had, torch computes."""
