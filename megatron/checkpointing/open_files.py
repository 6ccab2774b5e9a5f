"""Tensors of several safetensors files, each opened once."""

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron.errors import CheckpointError

# Far below the usual limit of 1024 open files a process.
_MOST_OPEN = 128


class OpenFiles:
    """Files of one checkpoint to read tensors from, open until the `with` block ends."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "OpenFiles":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close()

    def names(self, file: str) -> list[str]:
        """Names of the tensors in `file`."""
        return list(self._open(file).offset_keys())

    def shape(self, file: str, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the header alone."""
        return tuple(self._open(file).get_slice(name).get_shape())

    def tensor(self, file: str, name: str) -> Tensor:
        """A tensor of `file` on the CPU. Its bytes are read from the disk as they are used."""
        opened = self._open(file)
        try:
            tensor: Tensor = opened.get_tensor(name)
        except SafetensorError as error:
            raise self._unreadable(file, error) from error
        return tensor

    def _open(self, file: str) -> Any:
        if file not in self._files:
            if len(self._files) >= _MOST_OPEN:
                self._close()
            try:
                self._files[file] = self._stack.enter_context(
                    safe_open(self._directory / file, framework="pt", device="cpu")
                )
            except (SafetensorError, OSError) as error:
                raise self._unreadable(file, error) from error
        return self._files[file]

    def _unreadable(self, file: str, error: Exception) -> CheckpointError:
        return CheckpointError(f"{self._directory / file} cannot be read: {error}")

    def _close(self) -> None:
        self._files.clear()
        self._stack.close()
