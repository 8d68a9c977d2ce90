"""What happens in a running job, in words for a person. Pure.

An event gets its `rank` from the file that it stands in, `None` for what the supervisor saw.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from allranks.errors import FaultKind
from allranks.job.run_folder import REMOVED

NOT_SEEN = "the witness could not look at everything"
LEFT_OUT = {
    "inner_left_out": "a checkpoint without the newest optimizers",
    "rest_left_out": "the weights of the end lack the last findings",
}


def in_words(event: dict[str, Any]) -> list[str]:
    """The lines to print for an event while the job runs; empty for most events."""
    name = event["event"]
    if name == "resumed":
        resumed = f"resumes after step {event['step']}, from {event['path']}"
        changes = {**event["changes"], **event["differs"]}
        return [resumed, *(f"note: {n} was {was}, is {now}" for n, (was, now) in changes.items())]
    if name == "program_changed":
        return [f"note: {n} was {was}, is {now}" for n, (was, now) in event["differs"].items()]
    if name in ("data_notes", "model_notes", "rate_notes", "callback_notes"):
        return [f"note: {note}" for note in event["notes"]]
    if name == "restart":
        again = f"starting again from step {event['resumes_from']}"
        return [_fault(event), f"{again}: {event['lost_steps']} steps lost"]
    if name == "evaluated":
        words = evaluation_in_words(event["step"], event["metrics"], bool(event.get("best")))
        return [f"{_whose(event)}evaluated {words}"]
    if name == "profiled":
        return [f"profile of steps {event['first']} to {event['last']}: {event['path']}"]
    if name == "checkpoint_failed":
        where = f"rank {event['rank']}: {event['error']}"
        return [f"note: no checkpoint of step {event['step']} ({where}); training goes on"]
    if name == "checkpoint_skipped":
        return [f"note: {event['path']} is damaged, and passed over: {event['problems'][0]}"]
    if name == "job_file_restored":
        return ["note: job.toml was removed while the job ran, and is written again"]
    if name in ("kept_elsewhere", "not_kept"):
        return [f"note: {_not_kept_there(event)}"]
    if name == "bad_step":
        return [f"note: {_whose(event)}{event['bad']}"]
    if name == "witness":
        lines = [f"note: NOT equal on other numbers of ranks: {text}" for text in event["found"]]
        return [*lines, *(f"note: {NOT_SEEN}: {text}" for text in event.get("unseen", ()))]
    if name == "worker_lost":
        return [f"note: {event['who']} is lost: {event['cause']}; the others go on"]
    if name == "moved":
        moved = ", ".join(f"{role} from {was} to {now}" for role, was, now in event["processes"])
        return [f"note: moved to a node that is left: {moved}"]
    if name == "learner_lost" and event["freed"]:
        return [f"note: {_handed_out_again(event)}"]
    if name in LEFT_OUT:
        return [f"note: {LEFT_OUT[name]} of learners {', '.join(map(str, event['learners']))}"]
    if name == "learner_joined" and event["version"]:
        return [f"note: learner {event['learner']} joins at version {event['version']}"]
    if name == "straggler":
        return [f"note: rank {event['rank']} on {event['host']} is {_slow(event)}"]
    if name == "done" and event.get("note"):
        return [event["note"]]
    return []


def anomalies_in(event: dict[str, Any]) -> list[tuple[int | None, str]]:
    """(rank, what) of an event that tells of something wrong; `None` where no one rank did it."""
    name = event["event"]
    if name == "restart":
        fault = "no sign of life" if _is_hang(event) else "failed"
        again = f"{fault}; all ranks started again from step {event['resumes_from']}"
        return [(event["first_rank"], again)]
    if name == "checkpoint_failed":
        return [(event["rank"], f"no checkpoint of step {event['step']}: {event['error']}")]
    if name == "bad_step":
        culprits = event.get("culprits", ())
        problems = [(rank, f"step {event['step']}: {text}") for rank, text in culprits]
        return [*problems] or [(event["rank"] or None, event["bad"])]
    if name == "witness":
        return [(None, f"follows the ranks: {text}") for text in event["found"]]
    if name == "worker_lost":
        return [(event["rank"], f"lost: {event['cause']}")]
    if name == "learner_lost":
        return [(None, _handed_out_again(event))] if event["freed"] else []
    if name == "straggler":
        return [(event["rank"], _slow(event))]
    if name == "done" and event.get("note"):
        return [(None, event["note"].removeprefix("note: "))]
    return []


def _handed_out_again(event: dict[str, Any]) -> str:
    """`learner 2 is gone at version 7: its 64 samples of steps 12 to 15 are handed out again`."""
    parts = ", ".join(
        f"{part['samples']} samples of steps {part['first']} to {part['last']}"
        for part in event["freed"]
    )
    learner = f"learner {event['learner']} is gone at version {event['version']}"
    return f"{learner}: what it had is handed out again: {parts}"


def evaluation_in_words(step: int, metrics: Mapping[str, Any], best: bool) -> str:
    """`after step 200: accuracy 0.9123 (best so far)`."""
    values = ", ".join(f"{name} {float(value):.4f}" for name, value in metrics.items())
    return f"after step {step}: {values or 'no metrics'}{' (best so far)' if best else ''}"


def not_in_the_run_folder(file: str, where: Mapping[str, str] | None, lost: str = "") -> str:
    """A sentence about a file that was not kept: the disk was full, or the file was removed."""
    if lost == REMOVED:
        return f"{file} has LOST {lost} while the job ran; what came since is there"
    if where is None:
        return f"{file} is LOST ({lost}): the disk is full, and nowhere else was room"
    copy = f"{where['path']} on {where['host']} has {where['holds']}"
    return f"{file} is NOT in the run folder, whose disk is full: {copy}"


def _not_kept_there(event: dict[str, Any]) -> str:
    return not_in_the_run_folder(event["file"], event.get("where"), event.get("error", ""))


def _whose(event: dict[str, Any]) -> str:
    """A prefix with the rank, except for the leader, which writes for all ranks."""
    return f"rank {event['rank']}: " if event["rank"] else ""


def _slow(event: dict[str, Any]) -> str:
    its, usual = 1e3 * event["seconds_per_step"], 1e3 * event["usual_seconds_per_step"]
    return f"slow in `{event['phase']}`: {its:.1f} ms per step, the others {usual:.1f} ms"


def _fault(event: dict[str, Any]) -> str:
    """The first line of a restart's report; for a hang, also the missing rank."""
    first, *others = event["report"].splitlines()
    return f"{first}: {next(iter(others), '')}" if _is_hang(event) else str(first)


def _is_hang(event: dict[str, Any]) -> bool:
    return event.get("fault_kind") == FaultKind.HANG
