"""An export of the version that had one modelling file still loads, generates and imports, without being trusted.

`tests/fixtures/exports/single_file` was written by commit 631f0ca from a random llama of width 16 with ponderlm3, and
`single_file.safetensors` holds what that commit computed with it.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file

from megaponder.export.from_hf import import_hf
from megaponder.export.load import load_folder
from megaponder.export.to_hf import export
from tests.tolerance import PARITY, difference

EXPORTS = Path(__file__).parents[1] / "fixtures" / "exports"


def test_an_export_with_one_modelling_file(tmp_path: Path) -> None:
    shutil.copytree(EXPORTS / "single_file", tmp_path / "old")
    imported = import_hf(tmp_path / "old", tmp_path / "run")
    assert imported.config.ponder.method == "ponderlm3" and imported.max_difference < PARITY
    export(tmp_path / "run", tmp_path / "new")
    want = load_file(EXPORTS / "single_file.safetensors")
    for folder in ("old", "new"):
        net = load_folder(tmp_path / folder)
        with torch.no_grad():
            for name, given in (("logits", {}), ("decoded", {"jacobi": "converge"})):
                got, then = net(want["ids"], **given).logits, want[name]
                scale = (got.abs().amax(-1) / then.abs().amax(-1))[..., None]
                assert (scale > 1 - PARITY).all()  # since then the exit masses of the rows that are left sum to 1
                assert difference(got, scale * then) < PARITY
            text = net.generate(want["ids"], max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert torch.equal(text, want["text"])
