"""Walking the project within limits. Nothing outside the audited path is ever opened."""

from __future__ import annotations

import fnmatch
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

SKIPPED_FOLDERS = frozenset(
    (".git", "node_modules", ".venv", "venv", "site-packages", "__pycache__", "dist", "build", ".tox",
     "outputs", "wandb", "checkpoints", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hg", ".svn")
)  # fmt: skip
MAX_FILES = 20_000
MAX_FILE_BYTES = 2 * 2**20
MAX_TOTAL_BYTES = 200 * 2**20


@dataclass(slots=True)
class Scan:
    """Which files were found, and what was left out and why."""

    root: Path
    max_files: int = MAX_FILES
    exclude: tuple[str, ...] = ()
    visited: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    """Reason → number of files or folders."""
    total_bytes: int = 0
    truncated: bool = False

    def skip(self, reason: str) -> None:
        self.left_out[reason] = self.left_out.get(reason, 0) + 1

    def files(self) -> Iterator[str]:
        """Paths relative to `root` in sorted order, `/` separators."""
        if self.root.is_file():
            self.visited = 1
            yield self.root.name
            return
        real = os.path.realpath(self.root)
        seen = {real}
        yield from self._walk("", real, seen)

    def _walk(self, prefix: str, real_root: str, seen: set[str]) -> Iterator[str]:
        folder = self.root / prefix if prefix else self.root
        try:
            entries = sorted(os.scandir(folder), key=lambda e: e.name)
        except OSError:
            self.skip("unreadable folder")
            return
        for entry in entries:
            relative = f"{prefix}{entry.name}"
            if any(fnmatch.fnmatch(relative, g) or fnmatch.fnmatch(entry.name, g) for g in self.exclude):
                self.skip("excluded")
                continue
            try:
                if entry.is_symlink() and not self._inside(entry.path, real_root):
                    self.skip("symbolic link out of the project")
                    continue
                mode = entry.stat().st_mode
            except OSError:
                self.skip("unreadable file")
                continue
            if stat.S_ISDIR(mode):
                if entry.name in SKIPPED_FOLDERS or entry.name.endswith(".egg-info"):
                    continue
                real = os.path.realpath(entry.path)
                if real in seen:
                    self.skip("symbolic link to a folder already seen")
                    continue
                seen.add(real)
                yield from self._walk(f"{relative}/", real_root, seen)
            elif stat.S_ISREG(mode):
                if self.visited >= self.max_files:
                    self.skip("beyond the limit of files")
                    self.truncated = True
                    continue
                self.visited += 1
                yield relative
            if self.truncated and self.left_out.get("beyond the limit of files", 0) >= 10 * self.max_files:
                return

    def _inside(self, path: str, real_root: str) -> bool:
        real = os.path.realpath(path)
        return real == real_root or real.startswith(real_root + os.sep)

    def read(self, relative: str) -> bytes | None:
        """The bytes of a file of the project, or None with the reason counted."""
        path = self.root if self.root.is_file() else self.root / relative
        try:
            size = path.stat().st_size
            if size > MAX_FILE_BYTES:
                self.skip("larger than 2 MiB")
                return None
            if self.total_bytes + size > MAX_TOTAL_BYTES:
                self.skip("beyond 200 MiB in all")
                return None
            data = path.read_bytes()
        except OSError:
            self.skip("unreadable file")
            return None
        self.total_bytes += len(data)
        return data


def tracked(root: Path, relative: str) -> bool:
    """False only if `root` is a git work tree whose index does not list the file.

    Index versions 2 and 3 hold each path in full, NUL-terminated; version 4
    compresses prefixes and is taken as "tracked".
    """
    index = root / ".git" / "index"
    try:
        data = index.read_bytes()
    except OSError:
        return True
    if data[:4] != b"DIRC" or data[4:8] not in (b"\0\0\0\2", b"\0\0\0\3"):
        return True
    return relative.encode() + b"\0" in data
