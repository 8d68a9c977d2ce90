"""What can be drawn of each strategy: how often, of which models, on which ranks, how said.

The cards say which options there are; here stands which values of them fit each other, so that what
is drawn mostly runs. Strategies that promise the result of one process at one setting alone are
drawn at that setting, as their card says it.
"""

from __future__ import annotations

import random
from typing import Any

from drawn_task import TEXTS

from allranks.strategies.card import Option
from allranks.strategies.cards import CARDS

LAYERED = ("gpipe", "1f1b", "interleaved", "zero-bubble", "mesh", "model-parallel")
SEQUENTIAL = ("layers", "images", "residual", "words", "contrast")
NEEDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(LAYERED, SEQUENTIAL),
    "tensor": ("layers", "images", "words", "sentences", "recurrent"),
    "context": ("sentences",),
    "expert": ("mixture",),
    "branches": ("rare",),
}
"""The models that some strategies cut."""
OUTER: dict[str, str] = {
    "local-sgd": "every=1",
    "slowmo": "every=1,alpha=1,beta=0",
    "block-momentum": "every=1,momentum=0,block_rate=1",
    "diloco": "every=1,lr=1,momentum=0",
    "sparse-loco": "every=1,keep=64,chunk=64,bits=0,decay=1,lr=1",
}
"""Where each is exact, if the optimizer is SGD without momentum, and clips nothing."""
RATES: dict[str, float] = {
    **{"ddp": 5.0, "zero1": 2.0, "zero2": 2.0, "fsdp": 1.2, "hsdp": 0.8, "ddp-plain": 1.0},
    **{"single": 0.5, "dp": 0.7, "model-parallel": 1.0, "ps": 0.5},
    **dict.fromkeys(("gpipe", "1f1b", "interleaved", "zero-bubble"), 0.7),
    **{"mesh": 2.0, "tensor": 1.5, "context": 4.0, "expert": 6.0, "branches": 3.0},
    **dict.fromkeys(OUTER, 1.5),
}
RANKS = {1: 1.0, 2: 6.0, 3: 3.0, 4: 2.0, 6: 0.2, 8: 0.1}
CLOCKED = ("patience_s", "grace_s", "rejoins", "least", "backup")
"""Options that say how long something is waited for, and change no weight."""
NOT_EXACT = ("fp16", "bf16", "two-bit", "demo", "one-bit", "n-bit")
WHOLE = {
    "top-k": "top-k(k=64,chunk=64)",
    "power-sgd": "power-sgd(rank=4096,min_rate=0)",
}
"""Compressed sums that leave nothing out."""


def suits(name: str, settings: dict[str, Any]) -> bool:
    """Whether a setting changes anything, and can be, of the model that the others describe."""
    kind, norm = settings.get("kind", "layers"), settings.get("norm", "none")
    if kind == "lookups" and name in ("penalty", "frozen", "clip_norm"):
        return False
    if name == "trait":
        return kind not in ("mixture", "lookups") and norm != "batch"
    if name == "norm":
        return kind in ("layers", "images", "residual")
    if name == "batchnorm":
        return kind in ("layers", "images", "residual") and norm == "batch"
    if name == "dropout":
        return kind in ("layers", "images", "sentences")
    if name == "weighted":
        return kind not in (*TEXTS, "contrast")
    if name == "last_batch":
        return settings.get("samples", 64) >= settings.get("batch_size", 8)
    if name in ("batch_size", "shards") and kind == "contrast":
        return settings.get("batch_size", 8) >= settings.get("shards", 8)
    if name in ("batch_size", "shards") and norm == "batch":
        return settings.get("batch_size", 8) > settings.get("shards", 8)
    return True


def said_of(
    name: str, settings: dict[str, Any], bitwise: bool, dice: random.Random
) -> tuple[str, int] | None:
    """The strategy with some options, as it is written, and ranks for it; `None`: once more."""
    ranks = dice.choices(list(RANKS), list(RANKS.values()))[0]
    if not CARDS[name].many_ranks:
        ranks = 1 if dice.random() < 0.98 else ranks
    if name in OUTER:
        return _learners(name, settings, ranks, dice)
    options = {
        option.name: _value(option, dice)
        for option in CARDS[name].options
        if option.name not in CLOCKED and dice.random() < 0.4
    }
    if bitwise:
        options = {n: v for n, v in options.items() if n not in ("reduce", "tensor", "split")}
    if any(value.startswith(NOT_EXACT) for value in options.values()) or "late" in options:
        return None
    options |= _axes(name, ranks, bitwise, dice)
    if name in LAYERED and _parts(name, options, ranks) > settings.get("depth", 2) + 1:
        return None
    said = ",".join(f"{key}={value}" for key, value in options.items())
    return (f"{name}:{said}" if said else name), ranks


def _axes(name: str, ranks: int, bitwise: bool, dice: random.Random) -> dict[str, str]:
    """The options by which ranks lie along axes, so that they come out even."""
    parts = [part for part in range(1, ranks + 1) if ranks % part == 0]
    if name == "mesh":
        tensor = 1 if bitwise else dice.choice(parts)
        line = dice.choice([part for part in parts if ranks // tensor % part == 0])
        return {"data": f"{ranks // tensor // line}", "tensor": f"{tensor}", "pipeline": f"{line}"}
    if name == "fsdp" and not bitwise and dice.random() < 0.2:
        return {"tensor": f"{dice.choice(parts)}", "reduce": "mean"}
    if name == "hsdp" and ranks > 1:
        return {"shard": f"{dice.choice(parts[1:])}"}
    if name in ("tensor", "context"):
        return {"data": f"{dice.choice(parts)}"}
    if name == "expert":
        return {"replicas": f"{dice.choice(parts[:-1] or [1])}"}
    return {}


def _parts(name: str, options: dict[str, str], ranks: int) -> int:
    """Into how many stages a strategy cuts a model."""
    if name == "model-parallel":
        return int(options.get("parts", 2))
    line = int(options["pipeline"]) if name == "mesh" else ranks
    is_dealt = name == "interleaved" or options.get("schedule", "").startswith("interleaved")
    return line * (int(options.get("chunks", 2)) if is_dealt else 1)


def _learners(
    name: str, settings: dict[str, Any], ranks: int, dice: random.Random
) -> tuple[str, int] | None:
    """Learners of one rank, or of several; where they are exact."""
    if settings.get("by", "sgd") != "sgd" or settings.keys() & {"clip_norm", "ema", "batchnorm"}:
        return None
    if settings.get("kind") == "contrast":
        return None
    said = OUTER[name]
    if ranks > 2 and ranks % 2 == 0 and dice.random() < 0.5:
        said += f",learners=2,inner={dice.choice(['ddp', 'zero1', 'zero2', 'fsdp'])}"
    if dice.random() < 0.3:
        said += f",after={dice.choice([2, 4])}"
    return f"{name}:{said}", ranks


def _value(option: Option, dice: random.Random) -> str:
    """A value of an option, as it is written."""
    if option.choices:
        choice = dice.choice(list(option.choices))
        if choice in WHOLE:
            return WHOLE[choice]
        own = [o for o in option.own_options(choice) if dice.random() < 0.5]
        inner = ",".join(f"{o.name}={_value(o, dice)}" for o in own)
        return f"{choice}({inner})" if inner else choice
    if isinstance(option.default, bool):
        return dice.choice(["true", "false"])
    if isinstance(option.default, int):
        least = int(option.at_least or 0)
        return str(dice.randint(least, least + 3))
    if option.name == "bucket_mb":
        return dice.choice(["0.0001", "0.001", "1"])
    return option.shown_default
