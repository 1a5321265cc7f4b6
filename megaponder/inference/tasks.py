"""Tasks of lm-eval on a model, in this process."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megaponder.errors import UserError


def require(tasks: Sequence[str], folder: str | None = None, field: str = "--tasks") -> Any:
    """lm-eval's register of tasks, those of `folder` among them; UserError where it or one of `tasks` is absent."""
    if find_spec("lm_eval") is None:
        raise UserError(f'{field} needs lm-eval, which is not installed; run: pip install "megaponder[eval]".')
    if folder is not None and not Path(folder).is_dir():
        raise UserError(f"{folder}: there is no such folder of tasks.")
    from lm_eval.tasks import TaskManager

    known = TaskManager(include_path=folder)
    if unknown := [t for t in tasks if t not in known.all_tasks]:
        raise UserError(f"{field} {unknown[0]}: lm-eval has no such task; `lm-eval ls tasks` lists them.")
    return known


def evaluate(
    path: str | Path,
    tasks: Sequence[str],
    batch: int = 8,
    trust_remote_code: bool = False,
    folder: str | None = None,
    limit: int | None = None,
) -> dict[str, dict[str, float]]:
    """Numbers of each task by lm-eval's own names of them, such as "acc,none".

    `path`: an export folder, a checkpoint, or a run folder (its newest one); `folder`: more task definitions; `limit`:
    examples of each task.  Raises UserError where lm-eval is absent, for tasks that it does not know, and for a model
    without a tokenizer.
    """
    known = require(tasks, folder)
    with tempfile.TemporaryDirectory() as temporary:
        model, tokenizer = _model(Path(path), Path(temporary), trust_remote_code)
        return _run(model, tokenizer, known, tasks, batch, limit)


def _model(path: Path, temporary: Path, trust_remote_code: bool) -> tuple[Any, Any]:
    from transformers import AutoTokenizer

    if (path / "config.json").is_file():
        from megaponder.export.load import load_folder

        if not (path / "tokenizer.json").is_file():
            raise UserError(f"{path} has no tokenizer.json, and tasks are text; export again with --tokenizer.")
        return load_folder(path, trust_remote_code=trust_remote_code), AutoTokenizer.from_pretrained(path)
    from megaponder.checkpoint.weights import load_weights
    from megaponder.export import names, tokenizer
    from megaponder.export.load import build_model
    from megaponder.export.to_hf import cast
    from megaponder.ponder.settings import table_rows

    cfg, state = load_weights(path)
    written = tokenizer.write(cfg, temporary, None, fix="call this where the path begins, or evaluate an export")
    if written.source is None:
        raise UserError(f"{path} does not name a tokenizer, and tasks are text; set data.tokenizer.")
    plain = names.to_plain(cast(state, "float32"), cfg.model, table_rows(cfg))
    return build_model(cfg, plain, written.eos_id), AutoTokenizer.from_pretrained(temporary)


def _run(
    model: Any, tokenizer: Any, known: Any, tasks: Sequence[str], batch: int, limit: int | None
) -> dict[str, dict[str, float]]:
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch)
    results = simple_evaluate(model=lm, tasks=list(tasks), task_manager=known, limit=limit)["results"]
    return {
        task: {name: float(v) for name, v in values.items() if isinstance(v, int | float) and name != "sample_len"}
        for task, values in results.items()
    }
