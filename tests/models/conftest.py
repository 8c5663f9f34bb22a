"""Model files shared by the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from models.text import ModelText, load_text
from tests.models.files import default_model, tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny valid model file; tests copy it before changing bytes."""
    return tiny_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="session")
def smol() -> Path:
    """The default model's file."""
    return default_model()


@pytest.fixture(scope="session")
def smol_text(smol: Path) -> ModelText:
    """The default model's tokenizer and template."""
    return load_text(smol)
