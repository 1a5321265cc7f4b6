"""What is refused before a process group exists: models too large for the machine; and memory that runs out later."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaponder.errors import UserError, out_of_memory
from megaponder.training import setup
from tests.data_pipeline.make import random_documents, write_documents
from tests.training.workers import config


def test_a_model_that_cannot_fit_is_refused(tmp_path: Path) -> None:
    for name in ("train", "valid"):
        write_documents(tmp_path / name, random_documents([500, 900]))
    sizes = {"model__vocab_size": 2000, "data__eod_id": 0}
    assert setup.complete(config(str(tmp_path / "run"), str(tmp_path), **sizes)).model.num_layers == 2
    for large in ({"model__hidden_size": 10**6}, {"model__num_layers": 10**7}):
        with pytest.raises(UserError, match="The model does not fit: its weights, gradients and optimizer state take"):
            setup.complete(config(str(tmp_path / "run"), str(tmp_path), **sizes, **large))


def test_memory_that_runs_out_is_a_sentence() -> None:
    import torch

    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**15)
    assert "use a smaller train.micro_batch" in str(out_of_memory(caught.value))
    gpu = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nGPU 0 has 1 GiB free")
    assert "CUDA out of memory" in str(out_of_memory(gpu)) and "\n" not in str(out_of_memory(gpu))
    assert out_of_memory(RuntimeError("shapes differ")) is None
