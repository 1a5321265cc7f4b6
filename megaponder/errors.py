"""Errors that are not bugs: they end the program with one sentence, no traceback, and a meaningful exit code.

0  done, or stopped by the file STOP          69  a rank was lost or hangs: restarting may help
1  a check failed, or a bug                   75  saved and stopped on request, to be restarted
2  a mistake that the user can fix            130 interrupted; 143 terminated: saved, if a run had started
"""

from __future__ import annotations

import errno
import os

LOST = 69
"""sysexits.h calls it EX_UNAVAILABLE."""
REQUEUE = 75
"""sysexits.h calls it EX_TEMPFAIL."""


class UserError(Exception):
    """Something the user can fix.  The message is one sentence: field or file, value, rule, nearest legal value."""

    exit_code = 2

    def __init__(self, message: str):
        # one line, whatever a file or name in it contains
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in message))


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""The disk is full or read-only; the error often names no file."""


IN_THE_WAY = {
    errno.EISDIR: "there is a folder where a file should be; move it away, or choose another path",
    errno.EEXIST: "there is a file where a folder should be; move it away, or choose another path",
    errno.ENOTDIR: "part of this path is a file where a folder should be; move it away, or choose another path",
    errno.EACCES: "permission denied; change its mode or owner, or choose another path",
}


def of_file(error: OSError) -> UserError | None:
    """The sentence for a file that cannot be read or written; None for errors not about a file (a connection)."""
    name = error.filename2 or error.filename  # for a rename, the user knows the second name
    name = os.fsdecode(name) if isinstance(name, bytes) else name
    if name is None and error.errno not in FULL:
        return None
    return UserError(f"{name or 'The disk'}: {IN_THE_WAY.get(error.errno or 0, error.strerror or error)}.")


def shortage(error: BaseException) -> str | None:
    """The sentence for running out of file descriptors, processes or threads; None for other errors."""
    import resource

    code, text = getattr(error, "errno", None), str(error)
    if code == errno.EMFILE or (isinstance(error, ImportError) and os.strerror(errno.EMFILE) in text):
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"This process has reached its limit of {most} open files and connections; raise the limit (ulimit -n)."
    if code == errno.ENFILE:
        return "This machine has run out of file descriptors; stop other programs, or raise fs.file-max."
    if code == errno.EAGAIN or "can't start new thread" in text:
        return (
            "No more processes or threads can be started here; stop other programs, or raise the limits (ulimit -u and "
            "-v, or the container's)."
        )
    return None


MACHINE = (OSError, RuntimeError, MemoryError, ImportError, SystemError)
"""Types of the errors that `known` recognises."""


def known(error: BaseException) -> UserError | None:
    """The sentence for an error of the machine (files, descriptors, threads, memory); None for what may be a bug."""
    if (words := shortage(error)) is not None:
        return UserError(words)
    if isinstance(error, OSError):
        return of_file(error)
    return out_of_memory(error)


def first_line(error: BaseException) -> str:
    """The first non-empty line of an error's text, and the next one if that only announces it; empty if there is
    none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])


_NO_MEMORY = ("can't allocate memory", "bad_alloc", "failed to map segment", os.strerror(errno.ENOMEM))


def _memory_is_limited() -> bool:
    import resource

    return resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY


def out_of_memory(error: BaseException) -> UserError | None:
    """The sentence for running out of GPU or host memory; None for other errors."""
    lines = [line.strip() for line in str(error).splitlines() if any(sign in line for sign in _NO_MEMORY)]
    said = (lines[0] if lines else first_line(error)).rstrip(".")
    kind = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    if isinstance(error, SystemError):  # what CPython raises when an allocation fails at a bad moment
        kind = "error return without exception set" in said and _memory_is_limited()
    if not kind and not any(sign in str(error) for sign in _NO_MEMORY):
        return None
    if isinstance(error, ImportError):
        return UserError(f"Memory ran out while loading a library ({said}); raise the limit (ulimit -v).")
    return UserError(
        f"Memory ran out ({said or 'of the host'}); use a smaller train.micro_batch, parallel.recompute: layer "
        "or more model-parallel processes; `megaponder plan` shows the memory it expects."
    )


def is_lost_connection(error: BaseException) -> bool:
    """Whether a collective failed because of another process (gloo raises plain RuntimeErrors)."""
    if any(cls.__name__ == "DistError" for cls in type(error).__mro__):  # torch's; this module does not import torch
        return True
    signs = ("gloo", "Connection closed by peer", "Connection reset by peer", "NCCL", "timed out", "Timed out")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


class LostRank(UserError):  # noqa: N818  the sentence is for a user
    """Another rank, its machine or the network was lost; the command itself is fine."""

    exit_code = LOST


class ConfigError(UserError):
    """A field of the configuration breaks a rule."""

    def __init__(self, field: str, value: object, rule: str, fix: str):
        super().__init__(f"{field} = {value!r}: {rule}; {fix}.")
        self.field, self.value, self.rule, self.fix = field, value, rule, fix
