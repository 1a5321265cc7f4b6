"""Decoding of a retrofitted model."""

from __future__ import annotations

from megaponder.ponder.methods.huginn.decoding import DECODING, Recurrent


class Retrofit(Recurrent):
    """As in huginn: the prelude runs once, the core `recurrence` times, the coda once."""

    name = "retrofit"
    defaults = {"prelude": 4, "coda": 4, "recurrence": 4, "noise_seed": 0, **DECODING}
