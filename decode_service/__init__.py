"""Floor 3: the decode worker, the process that receives KV and makes tokens."""
