"""The only module that imports ONNX Runtime: without its telemetry, on one thread, with its errors in one line."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from baffle.errors import ModelError, first_line
from baffle.runtime.onnx.protobuf import require_whole

# The import itself starts threads, writes a device id into the home folder and asks for a host of Microsoft's. A call
# of `disable_telemetry_events` comes too late for that.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

import onnxruntime

FATAL = 4  # the log level at which ONNX Runtime does not print errors that it raises

NODE = re.compile(r"Non-zero status code returned while running (\w+) node\..*? Status Message: (.*)", re.DOTALL)
"""How ONNX Runtime says that a node failed, and why."""

SOURCE = re.compile(r"^/\S+:\d+ .*?(?:\] ?| was false\. )", re.DOTALL)
"""A place in ONNX Runtime's source code and the condition that failed there, which precede a reason."""


def open_session(model: bytes) -> Any:
    """Open a session with one thread, so that sums are always added in the same order. The memory arena stays on. All
    passes are alike, so with small micro-batches the arena is small; without it, every pass would ask the system for
    the same pages again. A model must be whole: ONNX Runtime would read any file that it names. The bytes are read as
    ONNX only, because ONNX Runtime has a format of its own that is not checked here."""
    require_whole(model)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = FATAL  # ONNX Runtime prints a failure to stderr, beside raising it
    options.add_session_config_entry("session.load_model_format", "ONNX")
    with translated("the model"):
        return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Errors of ONNX Runtime about `what`, as ours in one line, without places in its source."""
    try:
        yield
    except Exception as fault:  # ONNX Runtime's errors have no narrower common ancestor
        node = NODE.search(str(fault))
        reason = first_line(ValueError(f"{node[1]}: {SOURCE.sub('', node[2])}") if node else fault)
        raise ModelError(f"ONNX Runtime {onnxruntime.__version__} refuses {what}: {reason}") from None
