"""megaponder: pretraining of pondering language models on megatron-core."""

__version__ = "0.1.0"
