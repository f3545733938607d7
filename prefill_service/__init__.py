"""Floor 3: the prefill worker, the process that computes prompts and hands their KV off."""
