"""Work of files spread over a few threads: checksums and copies hold no lock of the interpreter."""

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_THREADS = 4


def spread(action: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """`[action(item) for item in items]`; what fails first is raised when all threads have ended.

    The threads are daemons, unlike those of a pool: a process that ends does not finish a save first.
    """
    results: dict[int, Result] = {}
    failures: list[Exception] = []
    left = iter(enumerate(items))

    def work() -> None:
        for place, item in left:
            if failures:
                return
            try:
                results[place] = action(item)
            # Of any kind: nobody else would hear of it, and its item would be missing below.
            except Exception as failure:  # noqa: BLE001 - raised below, in the thread that asked
                failures.append(failure)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(_THREADS, len(items)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [results[place] for place in range(len(items))]
