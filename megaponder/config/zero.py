"""Sizes that DeepSpeed is given, for the engine and the planner."""

BUCKET = 50_000_000
"""Elements of gradients that are reduced at once, and of weights that are gathered ahead of their use."""
LIVE = 500_000_000
"""With weights sharded, elements that a rank holds whole at most, for their next use."""
