"""Measures any OpenAI-compatible server from outside, as its clients would. Knows nothing of Weir's own services."""
