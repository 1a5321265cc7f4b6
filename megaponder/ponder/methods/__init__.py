"""The shipped methods, one file each; importing this package registers them."""

from megaponder.ponder.methods import loop, pause, ponderlm, vanilla  # noqa: F401
