"""Building blocks of models: each owns its weights and calls the ops of `kernels`."""
