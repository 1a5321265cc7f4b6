"""Pondering language models for `transformers`: what every export consists of, beside its method's decoding form.

`megaponder.export.compose` copies these files into export folders, side by side, so they import torch, transformers
and each other, and nothing else:

    configuration   fields of config.json
    cache           keys and values of all passes
    slots           those of tokens that halt: one slot for each pass that a token ran
    passes          what the rows of a pass read
    packed          the same for rows of several sequences side by side
    steps           decoding forms written as one pass of any rows
    backbone        embedding, layers, norm
    wide            numbers in float32 at least
    window, gates   which depths a budget leaves open, and who gets them
    method          base of a method's decoding form, which lies in `megaponder/ponder/methods/NAME/decoding.py`
    model           the model with its head, `forward` and `generate`
"""
