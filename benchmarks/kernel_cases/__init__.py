"""Every Triton kernel at the shapes of real models: what it must do at least, its inputs, and its plain counterpart.

A file an op or a few; `table.py` lists them all. Measured by `benchmarks.gpu`, told by `docs/kernels.md`.
"""
