"""The torch engine was here: it is `allranks.torch` now."""

raise ImportError("allranks.on_torch is now allranks.torch: from allranks.torch import Task")
