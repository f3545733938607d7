"""Floor 2: one engine in one process. Knows no network."""
