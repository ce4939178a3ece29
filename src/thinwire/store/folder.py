"""A folder that holds private data: closed to other users, and without links that lead out of it."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

from thinwire.store.errors import StoreError


class PrivateFolder:
    """A folder of this user with mode 0700, whose files have mode 0600.

    All files are opened relative to the open folder and without following links. A file is opened only if it is a
    regular one that belongs to this user and has no other name, so that writing to it changes nothing elsewhere.

    Args:
        path: The folder. It is made if it is missing, with its parents.

    Raises:
        StoreError: ``path`` is a link, not a folder, or belongs to another user.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise StoreError(f"{path} cannot hold a message store: {_not_followed(error)}") from None
        try:
            if os.fstat(self._descriptor).st_uid != os.geteuid():
                raise StoreError(f"{path} belongs to another user: name another folder")
            os.fchmod(self._descriptor, 0o700)
        except BaseException:
            self.close()
            raise

    def open(self, name: str, *, exclusive: bool = False) -> int:
        """A descriptor of a file, to read and to write. A file that is missing is made.

        Args:
            name: The file's name in this folder.
            exclusive: Raise if the file is there already.

        Raises:
            StoreError: The file is a link, not a regular file, or somebody else's.
        """
        flags = os.O_RDWR | os.O_CREAT | (os.O_EXCL if exclusive else 0)
        try:
            return self._open(name, flags)
        except FileExistsError:
            raise StoreError(
                f"{self.path / name} is there, and no message store made it: move it away, or name another folder"
            ) from None

    def read(self, name: str, max_bytes: int) -> bytes | None:
        """The content of a file, or None if there is no such file.

        Raises:
            StoreError: As `open`, or the file is larger than ``max_bytes``.
        """
        try:
            descriptor = self._open(name, os.O_RDONLY)
        except FileNotFoundError:
            return None
        with os.fdopen(descriptor, "rb") as file:
            content = file.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise StoreError(f"{self.path / name} has more than {max_bytes} bytes: remove {self.path}")
        return content

    def write(self, name: str, content: bytes) -> None:
        """Put a file in place as a whole: after a crash there is all of it, or what was there before."""
        fresh = f"{name}.{secrets.token_hex(8)}"
        descriptor = self.open(fresh, exclusive=True)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(fresh, name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(fresh, dir_fd=self._descriptor)
            raise

    def close(self) -> None:
        """Close the folder. Files that were opened stay open."""
        os.close(self._descriptor)

    def _open(self, name: str, flags: int) -> int:
        # O_NONBLOCK: opening a pipe without a writer would block.
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            descriptor = os.open(name, flags, 0o600, dir_fd=self._descriptor)
        except (FileExistsError, FileNotFoundError):
            raise
        except OSError as error:
            raise StoreError(f"{self.path / name} cannot be opened: {_not_followed(error)}") from None
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_nlink != 1:
            os.close(descriptor)
            raise StoreError(
                f"{self.path / name} is not a file of this store alone (a pipe or device, another user's, or one with "
                "a second name elsewhere): name another folder"
            )
        os.fchmod(descriptor, 0o600)
        return descriptor


def _not_followed(error: OSError) -> str:
    """The reason of an error; a symbolic link gives ``ELOOP`` or, where a folder is asked for, ``ENOTDIR``."""
    return f"{error.strerror} (symbolic links are not followed)"
