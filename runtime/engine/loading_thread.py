"""Loads a model in a thread that ends with it.

OpenMP keeps a pool of threads for each thread that has computed. With a second pool beside the
engine's there are more threads than cores, and GNU's puts them to sleep after each operation: a
decoded token took 1.4 to 1.7 times as long, four times beside other work (measured).
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextvars import copy_context
from functools import partial
from typing import TypeVar

from radixcache.runtime.engine.worker import answer

T = TypeVar("T")


def run_in_thread(read: Callable[[], T]) -> T:
    """The result of `read`; an interrupt ends it, too."""
    future: Future[T] = Future()
    loading = partial(copy_context().run, read)  # so that progress is reported here
    thread = threading.Thread(target=answer, args=(future, loading), daemon=True)
    try:
        thread.start()
        wait([future])  # after an interrupted `join`, Python 3.11 thinks that it ended
    except BaseException:  # as by Ctrl-C: a thread within torch must end before the interpreter
        if thread.ident is not None:  # it has begun
            if not future.cancel():
                stop = ctypes.py_object(KeyboardInterrupt)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), stop)
            wait([future])
        raise
    thread.join()
    return future.result()
