"""How each Triton kernel is launched for a model of eight billion parameters in bfloat16, a file an op or a few."""
