"""Tasks of lm-eval on an export folder, in this process."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from megaponder.errors import UserError


def evaluate(
    folder: Path, tasks: Sequence[str], batch: int = 8, trust_remote_code: bool = False
) -> dict[str, dict[str, float]]:
    """Numbers of each task by lm-eval's own names of them, such as "acc,none".

    Raises UserError where lm-eval is absent, for a folder that is no export, and for tasks that it does not know.
    """
    if find_spec("lm_eval") is None:
        raise UserError('--tasks needs lm-eval, which is not installed; run: pip install "megaponder[eval]".')
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} is no export folder, and tasks run on one; make it with megaponder export.")
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import AutoTokenizer

    from megaponder.export.load import load_folder

    known = TaskManager().all_tasks
    if unknown := [t for t in tasks if t not in known]:
        raise UserError(f"--tasks {unknown[0]}: lm-eval has no such task; `lm-eval ls tasks` lists them.")
    model = load_folder(folder, trust_remote_code=trust_remote_code)
    lm = HFLM(pretrained=model, tokenizer=AutoTokenizer.from_pretrained(folder), batch_size=batch)
    results = simple_evaluate(model=lm, tasks=list(tasks))["results"]
    return {
        task: {name: value for name, value in values.items() if isinstance(value, int | float)}
        for task, values in results.items()
    }
