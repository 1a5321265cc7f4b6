"""A checkpoint or tokenizer from elsewhere asks for little before a sentence says what is wrong."""

from __future__ import annotations

import pickle
import shutil
import time
from pathlib import Path

import pytest
from torch.distributed.checkpoint.metadata import Metadata

from megaponder.checkpoint import manifest, reader
from megaponder.checkpoint.state import load_state
from megaponder.checkpoint.weights import read_weights
from megaponder.data.tokenizer import load_tokenizer
from megaponder.errors import UserError
from tests.export import checkpoints

HUGE = 1 << 40


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bounds")
    checkpoints.make("llama", "loop", root)
    return root / "checkpoints" / "step_00000000"


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "step_00000000"))


def grow(path: Path) -> None:
    """Make a file huge, without using the disk."""
    with path.open("r+b") as file:
        file.truncate(HUGE)


def test_sizes(copy: Path, tmp_path: Path) -> None:
    grow(copy / "manifest.json")
    assert "a file of its kind has at most 67,108,864" in str(manifest.damage(copy))
    grow(copy / "state.json")
    with pytest.raises(ValueError, match="a file of its kind has at most 16,777,216"):
        load_state(copy)
    grow(copy / ".metadata")
    with pytest.raises(ValueError, match="a file of its kind has at most 1,073,741,824"):
        reader.index(copy)
    for name in ("tokenizer.json", "tokenizer.model"):
        (tmp_path / name).touch()
        grow(tmp_path / name)
        with pytest.raises(UserError, match=f"{name} has 1,099,511,627,776 bytes; .* at most 268,435,456"):
            load_tokenizer(str(tmp_path / name))


def test_layers(copy: Path) -> None:
    config = copy / "config.yaml"
    text = config.read_text()
    config.write_text(text.replace("num_layers: 2", "num_layers: 1000000000"))
    assert config.read_text() != text
    with pytest.raises(UserError, match=r"config\.yaml has 1,000,000,000 layers, but there are 15 tensors"):
        read_weights(copy)


def test_lists_that_tensors_share(copy: Path) -> None:
    """A small index whose tensors all have the same long list of parts would take hours to go through."""
    found: Metadata = pickle.loads((copy / ".metadata").read_bytes())
    [name, tensor], places = next(iter(found.state_dict_metadata.items())), next(iter(found.storage_data.values()))
    tensor.chunks = tensor.chunks * 200_000  # type: ignore[union-attr]
    found.state_dict_metadata = {f"{name}{i}": tensor for i in range(20_000)}
    (copy / ".metadata").write_bytes(pickle.dumps(found))
    began = time.process_time()  # of this process: the machine may be busy
    with pytest.raises(ValueError, match="several of its tensors share one list of parts"):
        reader.index(copy)
    assert places.relative_path and time.process_time() - began < 10
