"""Floor 1: what every process needs around its work. It does not know what a token is."""
