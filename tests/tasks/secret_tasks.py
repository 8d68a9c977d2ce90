"""A task with a field that holds a secret, for the tests of what a job leaves behind."""

from __future__ import annotations

from dataclasses import dataclass

import contract_tasks


@dataclass(kw_only=True)
class WithKey(contract_tasks.Plain):
    """It would fetch its data with `api_key`."""

    api_key: str = ""
