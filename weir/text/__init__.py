"""Floor 1: from text to token ids and back, chat templates, stop strings. Knows no engine and no network."""
