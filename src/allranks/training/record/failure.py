"""The record of a rank's failure, from which the supervisor finds the first one and its cause."""

from __future__ import annotations

import re
import traceback
from typing import Any

from allranks.errors import AllranksError, PeerLost, RequestError
from allranks.launcher.processes.process import classify, is_of_transport, words_of

LONGEST_MESSAGE, LONGEST_STACK = 4_000, 32_000  # characters; it is written, told and shown
COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # Keras paints its errors


def failure_of(error: BaseException, updates: int, step: int | None) -> dict[str, Any]:
    """The values of the event `failed`, after so many own updates, in `step` of the job."""
    of_ours, message = error if isinstance(error, AllranksError) else None, words_of(error)
    stack = "" if of_ours and of_ours.says_all else "".join(traceback.format_exception(error))
    return {
        "kind": type(error).__name__,
        "fault_kind": classify(error),
        "message": COLOURS.sub("", shortened(message, LONGEST_MESSAGE)),
        "traceback": COLOURS.sub("", shortened(stack, LONGEST_STACK)),
        "peer_lost": isinstance(error, PeerLost) or is_of_transport(message),
        "passing": of_ours.passing if of_ours else True,
        "request": error.to_data() if isinstance(error, RequestError) else None,
        "updates": updates,
        "step": step,
    }


def shortened(text: str, most: int) -> str:
    """The text, or its begin and its end where it has more characters than `most`."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters …\n{text[-half:]}"


def exit_code_of(error: BaseException) -> int:
    """The exit code of a rank that ends with `error`."""
    return error.exit_code if isinstance(error, AllranksError) else 1
