"""One interface to model files of every format. Never imports torch."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from models.config import ModelConfig
from models.errors import ModelFileError
from models.gguf import GgufFile
from models.hf import HfFolder
from models.tensors import TensorData

if TYPE_CHECKING:
    from models.text import ModelText

_EOS_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


class ModelSource(Protocol):
    """An open model: configuration, raw tensors under the names of GGUF files, text side. Close it after use."""

    @property
    def path(self) -> Path: ...
    @property
    def config(self) -> ModelConfig: ...
    @property
    def eos_ids(self) -> frozenset[int]: ...
    @property
    def tensor_names(self) -> Collection[str]: ...
    def tensor(self, name: str) -> TensorData: ...
    def fingerprint(self) -> str: ...
    def text(self) -> ModelText: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


class GgufSource:
    """A GGUF file; a `ModelSource`."""

    def __init__(self, path: Path) -> None:
        """Open and check the file.

        Raises:
            ModelFileError: it is missing, corrupt, or asks for something not supported; the message names it.
        """
        self.path = path
        self._file = GgufFile(path)
        try:
            self.config = ModelConfig.from_gguf(self._file)
            self.eos_ids = _eos_ids(self._file, self.config.vocab_size)
        except BaseException:
            self._file.close()
            raise

    @property
    def tensor_names(self) -> Collection[str]:
        """Names of all tensors."""
        return self._file.tensors.keys()

    def tensor(self, name: str) -> TensorData:
        """Return one tensor's kind, raw bytes and shape; bytes are not copied.

        Raises:
            KeyError: there is none of this name.
        """
        info = self._file.tensors[name]
        return TensorData(info.kind, self._file.data(info), info.shape)

    def fingerprint(self) -> str:
        """Return 32 hexadecimal digits that name the contents; see `GgufFile.fingerprint` for what that means."""
        return self._file.fingerprint()

    def text(self) -> ModelText:
        """Read tokenizer and chat template.

        Raises:
            ModelFileError: they are missing, corrupt or of a kind that is not supported.
        """
        # Engines never come here, and do without the memory of a template engine and a tokenizer library.
        from models.chat import ChatTemplate
        from models.gguf_tokenizer import read_gguf_tokenizer
        from models.text import ModelText

        tokenizer = read_gguf_tokenizer(self._file)
        return ModelText(tokenizer, ChatTemplate.from_gguf(self._file, tokenizer))

    def close(self) -> None:
        """Close the file; its memory goes with the last view that `tensor` handed out."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def open_model(path: Path) -> ModelSource:
    """Open a GGUF file or a Hugging Face folder.

    Raises:
        ModelFileError: it is missing, corrupt, or asks for something not supported; the message names file and fault.
    """
    path = Path(path)
    return HfFolder(path) if path.is_dir() else GgufSource(path)


def _eos_ids(file: GgufFile, vocab_size: int) -> frozenset[int]:
    found = {key: file.metadata[key] for key in _EOS_KEYS if key in file.metadata}
    for key, value in found.items():
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < vocab_size:
            raise ModelFileError(file.path, f"metadata {key!r} is {value!r:.80}, not one of {vocab_size} ids")
    return frozenset(found.values())
