"""Floor 2½: what the two kinds of worker process share, above engine, cluster and transfer, below both services."""
