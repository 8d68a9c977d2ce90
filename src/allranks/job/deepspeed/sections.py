"""A configuration of DeepSpeed as values of a job: what has a counterpart is taken, or refused.

Nothing is passed over in silence: every value of the job that comes from here says from which key,
keys that change nothing of the result are recorded as passed over, and every other key without a
counterpart is refused by its name. "auto" is what the task and the flags say.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from allranks.errors import RequestError
from allranks.job.recipes import KIND, REQUIRED, SCHEDULES
from allranks.strategies.cards import CARDS

# --- batch ---------------------------------------------------------------------------------------
# The three numbers that say how a global batch is cut: two of them give the third.
#
# train_batch_size = train_micro_batch_size_per_gpu · gradient_accumulation_steps · ranks


TRAIN, MICRO = "train_batch_size", "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"
KEYS = (TRAIN, MICRO, ACCUMULATION)


@dataclass(frozen=True)
class DeepSpeedBatch:
    """Samples of a step over all ranks, samples of one pass on one rank, passes of each rank."""

    train: int
    micro: int
    accumulation: int


def batch_of(data: Mapping[str, Any], path: str, ranks: int) -> DeepSpeedBatch | None:
    """The batch of a configuration on so many ranks; `None` if all its values are "auto".

    Numbers that do not fit raise `RequestError`, as DeepSpeed refuses them.
    """
    counts = {key: _count(key, data[key], path) for key in KEYS if data.get(key, "auto") != "auto"}
    if not counts and any(key in data for key in (TRAIN, MICRO)):
        return None
    train, micro, passes = (counts.get(key) for key in KEYS)
    if train is None and micro is None:
        raise RequestError(
            asked=f"--job {path}",
            found=f"neither {TRAIN} nor {MICRO} as a number",
            why=f"{ACCUMULATION} alone does not say how many samples a step has",
            do=f'give one of them, or {TRAIN}: "auto" alone for the batch_size of the task',
        )
    if train is None and micro is not None:
        passes = passes or 1
        train = micro * passes * ranks
    assert train is not None
    if micro is None:
        passes = passes or 1
        micro = train // ranks // passes
    passes = passes or train // micro // ranks
    if train != micro * passes * ranks:
        text = ", ".join(f"{key} = {value}" for key, value in counts.items())
        raise RequestError(
            asked=f"{text} in {path}, on {ranks} ranks",
            found=f"{train} is not {micro} · {passes} · {ranks}",
            why=f"{TRAIN} = {MICRO} · {ACCUMULATION} · ranks",
            do="change --ranks or one of them, or leave one of them out: it follows from the rest",
        )
    return DeepSpeedBatch(train, micro, passes)


def _count(key: str, value: Any, path: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RequestError(
            asked=f"{key} = {value!r} in {path}",
            found=repr(value),
            why=f"{key} is a count of at least 1",
            do=f'give {key} a whole number, or "auto"',
        )
    return value


STAGES = ("ddp", "zero1", "zero2", "fsdp")
"""By `zero_optimization.stage`."""
UNCLIPPED = (
    "the task says whether gradients are clipped; where a configuration does not, DeepSpeed 0.19.8 "
    "clips them at 1.0, and versions before it did not"
)
SPEED = "says how fast it is, not what comes out"
LOGGING = "says what is shown: allranks has records of its own"
PASSED_OVER = {
    **dict.fromkeys(("steps_per_print", "wall_clock_breakdown", "dump_state"), LOGGING),
    **dict.fromkeys(("memory_breakdown", "tensorboard", "wandb", "comet"), LOGGING),
    **dict.fromkeys(("csv_monitor", "comms_logger", "flops_profiler"), LOGGING),
    **dict.fromkeys(("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"), SPEED),
    "aio": SPEED,
}
PASSED_OVER_IN_ZERO = {
    **dict.fromkeys(("allgather_partitions", "allgather_bucket_size", "overlap_comm"), SPEED),
    **dict.fromkeys(("reduce_scatter", "reduce_bucket_size", "contiguous_gradients"), SPEED),
    **dict.fromkeys(("round_robin_gradients", "sub_group_size"), SPEED),
    **dict.fromkeys(("stage3_max_live_parameters", "stage3_max_reuse_distance"), SPEED),
    **dict.fromkeys(("stage3_prefetch_bucket_size", "prefetch_bucket_size"), SPEED),
    **dict.fromkeys(("stage3_param_persistence_threshold", "max_live_parameters"), SPEED),
    **dict.fromkeys(("stage3_module_granularity_threshold", "ignore_unused_parameters"), SPEED),
    "stage3_gather_16bit_weights_on_model_save": "weights are always written whole",
    "load_from_fp32_weights": "weights are always kept in fp32",
    "elastic_checkpoint": "checkpoints resume on any number of ranks",
}
OF_FP16 = ("enabled", "auto_cast", "loss_scale", "initial_scale_power", "loss_scale_window")
OF_SCALE = {"hysteresis": 1, "min_loss_scale": 1, "consecutive_hysteresis": False}
"""What the rule of the loss scale here is, in DeepSpeed's words."""


MOST_POWER = 127  # of 2 in a float32


@dataclass
class FromDeepSpeed:
    """Values of a job and of its task; `sources` say of each where it is from."""

    path: str
    values: dict[str, Any] = field(default_factory=dict)
    task: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def set_value(self, name: str, value: Any, key: str, value_there: Any) -> None:
        """Set a value of the job, or of the task (`task.NAME`), from the value of `key`."""
        where, _, field_name = name.rpartition(".")
        (self.task if where else self.values)[field_name] = value
        self.sources[name] = f"file {self.path}: {key} = {json.dumps(value_there)}"

    def note(self, key: str, value: Any, why: str) -> None:
        """Note a key that sets nothing."""
        self.sources[f"{Path(self.path).name}: {key}"] = f"{json.dumps(value)}, passed over: {why}"

    def refuse(self, key: str, value: Any, why: str, do: str) -> RequestError:
        return RequestError(
            asked=f"--job {self.path}", found=f"{key} = {json.dumps(value)}", why=why, do=do
        )


def read_deepspeed(path: str, ranks: int) -> FromDeepSpeed:
    """Read the configuration in `path` for so many ranks; raises `RequestError`."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8-sig"), object_pairs_hook=_once)
    except (OSError, ValueError, RecursionError) as error:
        raise _no_configuration(path, str(error) or type(error).__name__) from None
    if not isinstance(data, dict):
        raise _no_configuration(path, f"a {type(data).__name__}")
    result = FromDeepSpeed(path)
    _batch(result, data, ranks)
    for key, value in data.items():
        if key in SECTIONS and value != "auto":
            SECTIONS[key](result, key, value)
        elif key not in SECTIONS and key not in KEYS:
            _without_counterpart(result, key, value, PASSED_OVER)
    if "gradient_clipping" not in data:
        result.note("gradient_clipping", None, UNCLIPPED)
    if "scheduler" in data and "schedule" in result.values and "optimizer" not in result.values:
        raise result.refuse(
            "scheduler",
            data["scheduler"],
            "its rates are those of an optimizer, and the task's own has its own",
            "give optimizer too, or leave scheduler out and write schedule(step) in the task",
        )
    _check_precision(result, data)
    return result


def _batch(result: FromDeepSpeed, data: Mapping[str, Any], ranks: int) -> None:
    wanted = batch_of(data, result.path, ranks)
    if wanted is None:
        return
    counts = {key: data[key] for key in KEYS if key in data}
    result.set_value("task.batch_size", wanted.train, "batch", counts)
    result.set_value("micro_batch", wanted.micro, "batch", counts)


def _check_precision(result: FromDeepSpeed, data: Mapping[str, Any]) -> None:
    if {"bf16", "bfloat16"} <= data.keys():
        both = [data["bf16"], data["bfloat16"]]
        raise result.refuse("bf16, bfloat16", both, "both name one section", "leave bfloat16 out")
    sections = {key: data[key] for key in ("fp16", "bf16", "bfloat16") if key in data}
    on = [
        key for key, value in sections.items() if value != "auto" and value.get("enabled") is True
    ]
    if len(on) > 1:
        raise result.refuse(", ".join(on), True, "a job has one precision", "enable one of them")


def _zero(result: FromDeepSpeed, key: str, data: Any) -> None:
    section = _section(result, key, data)
    stage = section.pop("stage", 0)
    if stage == "auto":
        stage = 0
    if type(stage) is not int or stage not in range(len(STAGES)):
        raise result.refuse(f"{key}.stage", stage, "there are the stages 0, 1, 2, 3", "one of them")
    strategy = STAGES[stage]
    for name in ("offload_optimizer", "offload_param"):
        device = _section(result, f"{key}.{name}", section.pop(name, None) or {}).get("device")
        if device not in (None, "none"):
            strategy = _offloaded(result, f"{key}.{name}.device", device, strategy)
    result.set_value("strategy", strategy, f"{key}.stage", stage)
    for name, value in section.items():
        _without_counterpart(result, f"{key}.{name}", value, PASSED_OVER_IN_ZERO)


def _offloaded(result: FromDeepSpeed, key: str, device: Any, strategy: str) -> str:
    name = strategy.partition(":")[0]
    if device == "cpu" and any(option.name == "offload" for option in CARDS[name].options):
        return f"{name}:offload=cpu"
    raise result.refuse(
        key,
        device,
        f"{name!r} keeps what it trains on the devices that train",
        'device: "none"; stage 3 (fsdp) on more ranks needs less on each',
    )


def _fp16(result: FromDeepSpeed, key: str, data: Any) -> None:
    section = _section(result, key, data)
    if not _is_enabled(result, key, section):
        return
    result.set_value("precision", "fp16", f"{key}.enabled", True)
    scale, power = section.get("loss_scale", 0), section.get("initial_scale_power", 16)
    window = section.get("loss_scale_window", 1000)
    if type(power) is not int or not 0 <= power <= MOST_POWER:
        why = f"the first scale is 2 to that power, a float32: from 0 to {MOST_POWER}"
        raise result.refuse(f"{key}.initial_scale_power", power, why, "initial_scale_power: 16")
    if scale != "auto" and (isinstance(scale, bool) or not isinstance(scale, (int, float))):
        raise result.refuse(f"{key}.loss_scale", scale, "a number; 0 is dynamic", "loss_scale: 0")
    text = f"dynamic:initial={2.0**power},every={window}" if scale in (0, "auto") else str(scale)
    result.set_value("loss_scale", text, key, data)
    if section.get("auto_cast"):
        result.note(f"{key}.auto_cast", True, "inputs are always cast as the layers want them")
    for name, value in section.items():
        if name in OF_SCALE:
            if value != OF_SCALE[name] and text.startswith("dynamic"):
                why = f"the scale here is halved at every overflow, down to 1: {name} is "
                why += json.dumps(OF_SCALE[name])
                raise result.refuse(f"{key}.{name}", value, why, f"leave {name} out")
        elif name not in OF_FP16:
            _without_counterpart(result, f"{key}.{name}", value, {})
    if "hysteresis" not in section and text.startswith("dynamic"):
        result.note(f"{key}.hysteresis", 2, "its default; here the first overflow halves the scale")


def _bf16(result: FromDeepSpeed, key: str, data: Any) -> None:
    section = _section(result, key, data)
    if _is_enabled(result, key, section):
        result.set_value("precision", "bf16", f"{key}.enabled", True)
    for name, value in section.items():
        if name != "enabled":
            _without_counterpart(result, f"{key}.{name}", value, {"immediate_grad_update": SPEED})


def _is_enabled(result: FromDeepSpeed, key: str, section: Mapping[str, Any]) -> bool:
    enabled = section.get("enabled", False)
    if enabled == "auto":
        return False
    if not isinstance(enabled, bool):
        why = 'it is true, false, or "auto"'
        raise result.refuse(f"{key}.enabled", enabled, why, f'"{key}": {{"enabled": true}}')
    return enabled


def _clipping(result: FromDeepSpeed, key: str, limit: Any) -> None:
    is_number = isinstance(limit, (int, float)) and not isinstance(limit, bool)
    if not is_number or not 0 <= limit <= sys.float_info.max:
        why = "it is the longest gradient, a finite number; 0 is none"
        raise result.refuse(key, limit, why, f"{key}: 1.0")
    result.set_value("task.clip_norm", float(limit) or "none", key, limit)


def _recipe(result: FromDeepSpeed, key: str, data: Any) -> None:
    name, text_of = RECIPES[key]
    if (text := text_of(result.refuse, _section(result, key, data))) is None:
        result.note(key, data, f"all of it is auto: the {name} is the task's")
    else:
        result.set_value(name, text, key, data)


SECTIONS: dict[str, Callable[[FromDeepSpeed, str, Any], None]] = {
    "optimizer": _recipe,
    "scheduler": _recipe,
    "fp16": _fp16,
    "bf16": _bf16,
    "bfloat16": _bf16,
    "gradient_clipping": _clipping,
    "zero_optimization": _zero,
}


def _without_counterpart(
    result: FromDeepSpeed, key: str, value: Any, harmless: Mapping[str, str]
) -> None:
    """Note keys that change nothing or are off; refuse all others."""
    name = key.rpartition(".")[2]
    if name in harmless:
        result.note(key, value, harmless[name])
    elif not _is_on(value):
        result.note(key, value, "it is off")
    else:
        raise result.refuse(
            key,
            value,
            "nothing here does that, and what is asked for must not be passed over",
            f"leave {key} out",
        )


def _is_on(value: Any) -> bool:
    if isinstance(value, dict):
        return bool(value) and value.get("enabled", True) not in (False, "auto")
    return value not in (None, False, 0, "auto", "none", [])


def _section(result: FromDeepSpeed, key: str, data: Any) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise result.refuse(key, data, f"{key} is a section", f'"{key}": {{…}}')
    return dict(data)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"the key {twice!r} is there twice")
    return dict(pairs)


def _no_configuration(path: str, found: str) -> RequestError:
    return RequestError(
        asked=f"--job {path}",
        found=found,
        why="a job file that ends in .json is a configuration of DeepSpeed, one JSON object",
        do="check the path and the line",
    )


# --- optimizers ----------------------------------------------------------------------------------
# DeepSpeed's sections `optimizer` and `scheduler` in the words of a job. Pure.


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
SCHEDULERS = {known.deepspeed: name for name, known in SCHEDULES.items() if known.deepspeed}
"""Its name -> ours."""


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
    name, known = SCHEDULERS[kind], SCHEDULES[SCHEDULERS[kind]].params
    for param in REQUIRED:
        if param in known and param not in params:
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


RECIPES = {"optimizer": ("optimizer", optimizer_text), "scheduler": ("schedule", schedule_text)}
"""By section: the option of the job, and the function that writes its value."""


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
