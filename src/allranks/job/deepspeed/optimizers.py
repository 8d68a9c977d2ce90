"""DeepSpeed's sections `optimizer` and `scheduler` in the words of a job. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from allranks.errors import RequestError

Refuse = Callable[[str, Any, str, str], RequestError]

MOMENTS = {"lr": "lr", "eps": "eps", "weight_decay": "weight_decay"}
OPTIMIZERS: dict[str, tuple[str, Mapping[str, str]]] = {
    "adam": ("adamw", MOMENTS),  # DeepSpeed's Adam is AdamW unless adam_w_mode is false
    "adamw": ("adamw", MOMENTS),
    "sgd": (
        "sgd",
        {n: n for n in ("lr", "momentum", "weight_decay", "nesterov")},
    ),
}
"""Its name in small letters -> ours, and its parameters -> ours."""
AS_ALWAYS: Mapping[str, Any] = {
    **{"amsgrad": False, "bias_correction": True, "dampening": 0, "maximize": False},
}
KERNELS = ("torch_adam", "fused", "foreach", "capturable", "adam_w_mode", "betas")
RATES = {"warmup_min_lr": "lowest", "warmup_max_lr": "highest"}
WARMUP = {"warmup_num_steps": "steps", "warmup_type": "kind"}
TOTAL = {"total_num_steps": "total"}
SCHEDULERS: dict[str, tuple[str, Mapping[str, str], tuple[str, ...]]] = {
    "WarmupLR": ("warmup-lr", {**RATES, **WARMUP}, ("warmup_max_lr",)),
    "WarmupDecayLR": (
        "warmup-decay-lr",
        {**RATES, **WARMUP, **TOTAL},
        ("warmup_max_lr", "total_num_steps"),
    ),
    "WarmupCosineLR": (
        "warmup-cosine-lr",
        {"warmup_min_ratio": "lowest_ratio", "cos_min_ratio": "end_ratio", **WARMUP, **TOTAL},
        ("total_num_steps",),
    ),
}
"""Its name -> ours, its parameters -> ours, and those that must be said."""


def optimizer_text(refuse: Refuse, section: dict[str, Any]) -> str | None:
    """`adamw:lr=0.001,…`; `None` where every parameter is "auto". Raises `RequestError`."""
    kind, params = _taken(refuse, "optimizer", section)
    if kind.lower() not in OPTIMIZERS:
        raise refuse(
            "optimizer.type",
            kind,
            f"of DeepSpeed's optimizers there are {', '.join(OPTIMIZERS)} here",
            "leave optimizer out: the one of the task is taken (LAMB, LARS are in "
            "allranks.torch.optimizers)",
        )
    if _is_auto(refuse, "optimizer", params):
        return None
    name, known = OPTIMIZERS[kind.lower()]
    if kind == "Adam" and params.get("adam_w_mode") is False:
        name = "adam"
    values = _known(refuse, "optimizer", params, known)
    betas = params.get("betas")
    if betas is not None and name != "sgd":
        if not isinstance(betas, list) or len(betas) != 2:
            raise refuse("optimizer.params.betas", betas, "there are two", "betas: [0.9, 0.999]")
        values |= {"beta1": betas[0], "beta2": betas[1]}
    return _text(name, values)


def schedule_text(refuse: Refuse, section: dict[str, Any]) -> str | None:
    """`warmup-lr:steps=1000,…`; `None` where every parameter is "auto". Raises `RequestError`."""
    kind, params = _taken(refuse, "scheduler", section)
    if kind not in SCHEDULERS:
        raise refuse(
            "scheduler.type",
            kind,
            f"of DeepSpeed's schedulers there are {', '.join(SCHEDULERS)} here",
            "leave scheduler out, and write schedule(step) in the task "
            "(allranks.training.schedules)",
        )
    if _is_auto(refuse, "scheduler", params):
        return None
    name, known, needed = SCHEDULERS[kind]
    for param in needed:
        if param not in params:
            raise refuse(
                f"scheduler.params.{param}",
                None,
                "what it is follows from nothing",
                f"give {param}",
            )
    if params.pop("last_batch_iteration", -1) != -1:
        raise refuse(
            "scheduler.params.last_batch_iteration",
            section["params"]["last_batch_iteration"],
            "the updates of a job are counted in its checkpoints",
            "leave it out, and go on with --resume",
        )
    return _text(name, _known(refuse, "scheduler", params, known))


def _taken(refuse: Refuse, key: str, section: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    kind, params = section.pop("type", None), section.pop("params", {})
    section |= {"params": params} if params else {}
    if not isinstance(kind, str) or not isinstance(params, dict):
        raise refuse(key, section, "it has a type, and params", f'"{key}": {{"type": …}}')
    more = next((name for name in section if name != "params" and section[name]), None)
    if more is not None:
        raise refuse(f"{key}.{more}", section[more], "nothing here does that", f"leave {more} out")
    return kind, dict(params)


def _is_auto(refuse: Refuse, key: str, params: dict[str, Any]) -> bool:
    autos = [name for name, value in params.items() if value == "auto"]
    if autos and len(autos) < len(params):
        raise refuse(
            f"{key}.params.{autos[0]}",
            "auto",
            f"others are said here, and an {key} is either all of the task or all of this file",
            f"give {autos[0]} a value, or let all of them be auto",
        )
    return bool(autos)


def _known(
    refuse: Refuse, key: str, params: dict[str, Any], known: Mapping[str, str]
) -> dict[str, Any]:
    values = {}
    for name, value in params.items():
        if name in known and isinstance(value, (int, float, str, bool)):
            values[known[name]] = value
        elif not (name in KERNELS or (name in AS_ALWAYS and AS_ALWAYS[name] == value)):
            raise refuse(
                f"{key}.params.{name}",
                value,
                f"what is known of it: {', '.join(known)}",
                f"leave {name} out",
            )
    return values


def _text(name: str, values: dict[str, Any]) -> str:
    said = ",".join(
        f"{key}={str(value).lower() if isinstance(value, bool) else value}"
        for key, value in values.items()
    )
    return f"{name}:{said}" if said else name
