"""The shipped methods, one file each; importing this package registers them."""

from megaponder.ponder.methods import adaponderlm, adaptive_cot, loop, pause, ponderlm, ponderlm2, ponderlm3, vanilla  # noqa: F401
