"""The criteria of Huginn's exit, for options and decoding alike."""

EXITS = ("change", "cosine", "entropy", "divergence", "min_p", "likeliest")
