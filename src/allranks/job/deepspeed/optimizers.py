"""DeepSpeed's sections `optimizer` and `scheduler` in the words of a job. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from allranks.errors import RequestError
from allranks.job.deepspeed.recipe import KIND

Refuse = Callable[[str, Any, str, str], RequestError]

MOMENTS = {"lr": "lr", "eps": "eps", "weight_decay": "weight_decay"}
OPTIMIZERS: dict[str, tuple[str, Mapping[str, str]]] = {
    "adam": ("adamw", MOMENTS),  # DeepSpeed's Adam is AdamW unless adam_w_mode is false
    "adamw": ("adamw", MOMENTS),
    "sgd": ("sgd", {n: n for n in ("lr", "momentum", "weight_decay", "nesterov")}),
}
"""Its name in small letters -> ours, and its parameters -> ours."""
AS_ALWAYS: Mapping[str, Mapping[str, Any]] = {
    "adamw": {"amsgrad": False, "bias_correction": True, "maximize": False},
    "sgd": {"dampening": 0, "maximize": False},
}
"""Parameters that can have one value here, which changes nothing; by our name."""
KERNELS = {"adamw": ("fused", "foreach", "capturable"), "sgd": ("fused", "foreach")}
MODES = ("torch_adam", "adam_w_mode")
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
    always, kernels = AS_ALWAYS[name], KERNELS[name]
    params = {
        key: value
        for key, value in params.items()
        if key not in kernels and (key not in always or always[key] != value)
    }
    betas = {}
    if name == "adamw":
        betas = _betas(refuse, params)
        name = _adam(refuse, kind.lower(), params)
    return _text(name, _known(refuse, "optimizer", params, known) | betas)


def _adam(refuse: Refuse, kind: str, params: dict[str, Any]) -> str:
    """Whether its Adam is `adam` or `adamw`; takes what says so out of `params`."""
    modes = {mode: params.pop(mode) for mode in MODES if mode in params}
    for mode, value in modes.items():
        if not isinstance(value, bool):
            raise refuse(f"optimizer.params.{mode}", value, "it is true or false", f"{mode}: true")
    if kind == "adam" and not modes.get("adam_w_mode", True):
        return "adam"
    if modes.get("torch_adam", False) and "weight_decay" not in params:
        raise refuse(
            "optimizer.params.torch_adam",
            True,
            "weight_decay is not said: it is 0.01 in torch's AdamW, and 0 in DeepSpeed's own",
            "give weight_decay",
        )
    return "adamw"


def _betas(refuse: Refuse, params: dict[str, Any]) -> dict[str, Any]:
    """The two of Adam, taken out of `params`; none where it has none."""
    if "betas" not in params:
        return {}
    betas = params.pop("betas")
    if not isinstance(betas, list) or len(betas) != 2 or not all(map(_is_number, betas)):
        raise refuse("optimizer.params.betas", betas, "it is two numbers", "betas: [0.9, 0.999]")
    return {"beta1": betas[0], "beta2": betas[1]}


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
            "leave it out, and use --resume",
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
    for name, value in params.items():
        why = f"what is known of it: {', '.join(known)}"
        if name in known:
            why = _why_not(name, value)
        if why:
            raise refuse(f"{key}.params.{name}", value, why, f"change {name}, or leave it out")
    return {known[name]: value for name, value in params.items()}


def _why_not(name: str, value: Any) -> str:
    """What the parameter has to be, where the value is not; otherwise nothing."""
    if name == "warmup_type":
        return "" if value in KIND.choices else f"it is one of {', '.join(KIND.choices)}"
    if name == "nesterov":
        return "" if isinstance(value, bool) else "it is true or false"
    return "" if _is_number(value) else "it is a number"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _text(name: str, values: dict[str, Any]) -> str:
    text = ",".join(
        f"{key}={str(value).lower() if isinstance(value, bool) else value}"
        for key, value in values.items()
    )
    return f"{name}:{text}" if text else name
