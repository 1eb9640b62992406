"""Errors and warnings as text, to be sent from a rank to the test."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist


def error_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Returns the type, message and notes of the error that a call raises; "no error" if it raises none."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    return "no error"


def error_of_all(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Returns the first line of the error that a call raises, after a check that all ranks raise the same."""
    error = error_of(function, *args, **kwargs).partition("\n")[0]
    errors: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    assert errors == [error] * len(errors), errors
    return error


class _Listener(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextmanager
def warnings_of(module: str) -> Iterator[list[str]]:
    """Collects what a module logs, on this rank."""
    listener = _Listener()
    logging.getLogger(module).addHandler(listener)
    try:
        yield listener.messages
    finally:
        logging.getLogger(module).removeHandler(listener)
