"""The parts of the sample stage: parameters by row, operations on logits, random numbers, log probabilities.

Every operation is a plain function over tensors; the ones here are in torch and are the specification.
"""
