"""Memory that the system limits (`ulimit -v`): which errors speak of it, and how not to wait for it without end.

OpenBLAS, which numpy and scipy each bring along, takes 32 MiB of working memory for its first larger operation. If the
system refuses, it asks again for ever, deaf to signals. So that memory is taken when a limited command begins.
"""

import mmap
import resource

from its2clr.errors import InputError
from its2clr.wording import readable_size

BLAS_MEMORY = 128 * 2**20
"""Room for what numpy's and scipy's OpenBLAS take (32 MiB each), with as much again for the check itself."""
_WORDS = (
    "out of memory",
    "can't allocate memory",
    "Cannot allocate memory",
    "failed to map segment",  # of a library that is loaded
    "can't start new thread",  # which needs a stack
    "bad_alloc",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there was too little memory, in the words of Python, torch or the system."""
    return isinstance(error, MemoryError) or any(words in str(error) for words in _WORDS)


def limited_memory() -> int | None:
    """Bytes of address space that this process may have; None without a limit."""
    limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    finite = [limit for limit in limits if limit != resource.RLIM_INFINITY]
    return min(finite, default=None)


def said_out_of_memory(error: BaseException) -> str:
    """What was short of memory, and what to do: allow more where there is a limit, else lower the settings."""
    limit = limited_memory()
    said = str(error) or "out of memory"  # Python's own error of that kind has no words
    if limit is None:
        return f"{said}\nLower pretrain.batch_size, refine.batch_size or engine.extract_batch_size."
    return f"{said}: this process may have {readable_size(limit)} (ulimit -v); allow more, training needs about 5 GiB"


def take_blas_memory() -> None:
    """Let OpenBLAS take its working memory, where memory is limited; it keeps it until the process ends.

    Raises:
        InputError: There is no room for it.
    """
    if limited_memory() is None:
        return
    try:
        mmap.mmap(-1, BLAS_MEMORY).close()
        import numpy as np
        from scipy.linalg import lapack

        mmap.mmap(-1, BLAS_MEMORY).close()  # again: the libraries take room too
    except (OSError, MemoryError, ImportError) as error:
        raise InputError(said_out_of_memory(MemoryError())) from error
    _ = np.ones((200, 200)) @ np.ones((200, 200))  # small products need none
    lapack.dpotrf(np.eye(8))
