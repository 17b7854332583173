"""Kernels of neural network operators."""
