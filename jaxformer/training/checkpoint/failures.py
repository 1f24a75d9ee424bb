"""What may be wrong with a checkpoint, in a few words, and what is wrong with the machine instead."""

import errno

# What the machine refuses, whatever the checkpoint holds: no reason to call it invalid, which ends in its removal.
REFUSALS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM}


def refused_here(error: BaseException) -> bool:
    """Whether the machine refused, so that another try may succeed: too many open files, no permission, no memory."""
    seen: BaseException | None = error
    while seen is not None:
        text = str(seen)
        if isinstance(seen, MemoryError) or (isinstance(seen, OSError) and seen.errno in REFUSALS):
            return True
        if "Too many open files" in text or "Permission denied" in text or "Cannot allocate memory" in text:
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def reason_of(error: BaseException) -> str:
    """One short line of what went wrong, the operating system's word for it where there is one."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in (errno.ENOSPC, errno.EDQUOT):
            return "no space left on the disk"
        seen = seen.__cause__ or seen.__context__
    text = " ".join(str(error).split())
    if "Too many open files" in text:
        return "too many open files (see ulimit -n)"
    if "No space left" in text or "RESOURCE_EXHAUSTED" in text:
        return "no space left on the disk"
    return (text[:160] + " ...") if len(text) > 160 else text or type(error).__name__
