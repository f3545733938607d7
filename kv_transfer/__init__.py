"""Floor 2: moves the KV of one sequence from a prefill to a decode worker. Knows blocks as bytes, never a tensor."""
