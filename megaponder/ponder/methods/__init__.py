"""The shipped methods, one file each; importing this package registers them."""

from megaponder.ponder.methods import (  # noqa: F401
    adaponderlm,
    adaptive_cot,
    baselines,
    loop,
    pause,
    ponderlm,
    ponderlm2,
    ponderlm3,
    vanilla,
)
