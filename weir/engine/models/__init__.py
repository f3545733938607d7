"""Descriptions of model architectures: which layers, in which order, made from which tensors."""
