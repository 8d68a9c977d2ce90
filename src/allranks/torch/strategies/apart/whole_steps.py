"""What is refused where no process sees a whole step: under servers, and learners on their own."""

from __future__ import annotations

from collections.abc import Mapping

from allranks.errors import RequestError


def refuse_without_whole_steps(
    strategy: str, asked: Mapping[str, bool], *, found: str, why: str
) -> None:
    """Raise `RequestError` for the first that is `asked` of what needs all of a step."""
    for what, is_asked in asked.items():
        if is_asked:
            raise RequestError(
                asked=f"--strategy {strategy} with {what}",
                found=found,
                why=why,
                do="leave it out, or --strategy ddp",
            )
