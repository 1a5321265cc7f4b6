"""The model of exports, for any method of this installation; an export folder has a file of this name for its one."""

from __future__ import annotations

from megaponder.decoding.configuration import MegaponderConfig
from megaponder.decoding.model import PonderForCausalLM
from megaponder.export.compose import decoding_class
from megaponder.ponder.registry import methods

__all__ = ["MegaponderConfig", "MegaponderForCausalLM"]


class MegaponderForCausalLM(PonderForCausalLM):
    """A pondering language model with its head, by the method of its configuration."""

    def __init__(self, config: MegaponderConfig):
        if config.method not in (known := methods()):
            raise ValueError(f"method {config.method!r} is unknown; it must be one of {', '.join(sorted(known))}")
        self.decoding = decoding_class(config.method)
        super().__init__(config)
