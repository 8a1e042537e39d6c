"""structlog for every process: one line an event, readable in a terminal, JSON otherwise; the worker's name on each line."""

import logging
import sys
from typing import Any

import structlog


def configure(worker: str, *, level: str = "info", terminal: bool | None = None) -> None:
    """Set up structlog for this process. `terminal` None means: ask whether standard error is one."""
    if terminal is None:
        terminal = sys.stderr.isatty()
    renderer: Any = structlog.processors.JSONRenderer()
    if terminal:
        renderer = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    processors: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if not terminal:
        # without the values of locals: prompts and keys are among them
        tracebacks = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        processors.append(structlog.processors.ExceptionRenderer(tracebacks))
    structlog.configure(
        processors=[*processors, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(worker=worker)
