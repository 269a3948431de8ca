"""Work in threads that do not keep a process alive which has to end."""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import TypeVar

T = TypeVar("T")
# Not pools of Python: it waits for their threads before a process ends, and a run may have failed
# while a server still writes answers.


def in_background(act: Callable[[], T]) -> Future[T]:
    """Call `act` in a thread; the future has its result or its error."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(act())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def in_parallel(
    acts: Iterable[Callable[[], T]], *, threads: int, on_error: Callable[[], None]
) -> list[T]:
    """Return the results of calls, up to `threads` of them at once. After an error no further one
    begins, and `on_error` is called, which should end the others; the error is raised when they
    have ended."""
    waiting: SimpleQueue[tuple[int, Callable[[], T]]] = SimpleQueue()
    for each in enumerate(acts):
        waiting.put(each)
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run() -> None:
        while not errors:
            try:
                number, act = waiting.get_nowait()
            except Empty:
                return
            try:
                results[number] = act()
            except BaseException as error:
                errors.append(error)
                on_error()

    workers = [in_background(run) for _ in range(threads)]
    for worker in workers:
        worker.result()
    if errors:
        raise errors[0]
    return [results[number] for number in range(len(results))]
