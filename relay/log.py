"""structlog for every process: one line an event, readable in a terminal, JSON otherwise; the worker's name on each line.

A line never waits for its reader (`relay.line_writer`).
"""

import logging
from typing import Any

import structlog

from relay.line_writer import standard_error


def configure(worker: str, *, level: str = "info", terminal: bool | None = None) -> None:
    """Set up structlog for this process. `terminal` None means: ask whether standard error is one."""
    writer: Any = standard_error()
    if terminal is None:
        terminal = writer.isatty()
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
        logger_factory=structlog.WriteLoggerFactory(file=writer),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(worker=worker)
