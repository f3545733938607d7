"""Triton bodies of the ops in `kernels`, one op a file: kernel, then the function that checks, allocates and launches.

They are imported when a tensor lies on a GPU (Triton costs a process 70 MiB), and by tests, which run them in Triton's
interpreter.
"""
