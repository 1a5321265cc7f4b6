"""Finished or running runs side by side: what they reached for which data and compute, and in what else they differ."""
