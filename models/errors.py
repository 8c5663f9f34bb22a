"""What can be wrong with a model file."""

from __future__ import annotations

from pathlib import Path


class ModelFileError(ValueError):
    """Raised when a model file is missing, corrupt, truncated, or of a kind that is not supported."""

    def __init__(self, path: Path | str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = Path(path)
        self.problem = problem
