"""Floor 0: the vocabulary that every process shares. Standard library only."""
