"""How numbers are computed on one rank: their types, the layout of images, the kernels.

    fp32, fp64   weights, gradients and arithmetic of that type
    tf32         fp32, whose products may run on tensor cores with 10 bits of mantissa (CUDA)
    bf16, fp16   weights, gradients, optimizer and sums over ranks in fp32 (the "masters"); what
                 goes through the model is cast layer by layer (torch.autocast). fp16 needs a
                 loss scale, see `allranks.job.loss_scale`

Micikevicius et al. 2017, Mixed Precision Training, arXiv 1710.03740.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

import allranks.torch.accelerator as accelerator
from allranks.errors import FaultKind, RequestError
from allranks.job.job import Job
from allranks.launcher.plan import WORKSPACE_OF_CUBLAS
from allranks.launcher.processes.process import classify, is_said
from allranks.torch.data.collate import map_to_device
from allranks.torch.model.activation_checkpointing import RECOMPUTING

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
WHOLE = (torch.int64, torch.int32, torch.uint8, torch.bool)  # types that stay what they are
IMAGE_DIMS = 4  # (sample, channel, height, width)
NO_BACKWARD = -1  # what torch calls the backward pass in progress, where there is none


@dataclass(frozen=True)
class Precision:
    """The types of `parameters` and of what is computed (`None`: the same), on one device."""

    device: torch.device
    parameters: torch.dtype = torch.float32
    compute: torch.dtype | None = None
    channels_last: bool = False

    @classmethod
    def of(cls, job: Job, device: torch.device) -> Precision:
        """What a job says of it."""
        parameters = torch.float64 if job.precision == "fp64" else torch.float32
        return cls(device, parameters, HALF.get(job.precision), job.channels_last)

    def autocast(self) -> AbstractContextManager[Any]:
        """Within, forward passes and losses are computed as the job says."""
        if self.compute is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.compute)

    def to_device(self, data: Any) -> Any:
        """A collated batch on the device, its floating-point tensors as the parameters are."""
        device, parameters, keeps_layout = self.device, self.parameters, not self.channels_last

        def place(tensor: Tensor) -> Tensor:
            kind = tensor.dtype
            is_so = kind is parameters or kind in WHOLE
            if is_so and keeps_layout and tensor.device == device:
                return tensor
            if not tensor.is_floating_point():
                return tensor.to(self.device, self._kind_of(tensor))
            tensor = tensor.to(self.device, self.parameters)
            if self.channels_last and tensor.ndim == IMAGE_DIMS:
                return tensor.contiguous(memory_format=torch.channels_last)
            return tensor

        return map_to_device(place, self._cast, data, device)

    def model(self, model: nn.Module) -> nn.Module:
        """The model on the device, in these types and this layout; what is on meta stays there.

        Complex numbers stay complex: those of 64 bits go with fp32, those of 128 with fp64.
        """
        if any(t.is_complex() or t.is_meta for t in (*model.parameters(), *model.buffers())):
            model = model._apply(
                lambda t: (
                    t.to(t.device if t.is_meta else self.device, self._kind_of(t))
                    .resolve_conj()
                    .resolve_neg()
                )
            )
        else:
            model = model.to(self.device, self.parameters)
        if self.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            for norm in (m for m in model.modules() if isinstance(m, nn.GroupNorm)):
                norm.register_forward_pre_hook(_plain_where_it_ends)
        return model

    def _cast(self, tensor: Tensor) -> Tensor:
        """A tensor where it is, in the type that it is to have here."""
        return tensor.to(self._kind_of(tensor))

    def _kind_of(self, tensor: Tensor) -> torch.dtype:
        """The type that a tensor is to have here; whole numbers keep theirs."""
        if tensor.is_complex():
            return self.parameters.to_complex()
        return self.parameters if tensor.is_floating_point() else tensor.dtype


def _plain_where_it_ends(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    """An input of GroupNorm that needs no gradient, in torch's own layout.

    On a CPU the backward pass of torch 2.13 ends the process if it lies by channels.
    """
    first, *others = inputs
    if first.requires_grad or not torch.is_grad_enabled():
        return None
    return first.contiguous(), *others


def explain(error: RuntimeError, precision: Precision) -> None:
    """Say what an error of torch means: in a note, or as a `RequestError` that is raised.

    Two types that do not go together are noted with what usually made the other one; an allocation
    that fails, with what the device holds. A kernel without a deterministic form is refused, and so
    is a block that computes something else when its activations are recomputed.
    """
    text = str(error)
    if precision.compute is None and is_said(FaultKind.TWO_TYPES, text):
        error.add_note(
            f"This job computes in {precision.parameters}: weights and batches are of that type. A "
            "tensor that forward or loss makes itself is not, unless it says so: x.new_zeros(…), "
            "torch.randn_like(x), or torch.tensor(…, dtype=x.dtype)."
        )
    if classify(error) == FaultKind.OUT_OF_MEMORY and (report := accelerator.memory_report()):
        error.add_note(report)
    if is_said(FaultKind.NOT_DETERMINISTIC, text):
        raise RequestError(
            asked="--bitwise",
            found=text.partition(", but you set")[0].partition(". ")[0],
            why="its sums would come in another order, and to other bits, each time",
            do="compute it by another operation, or leave --bitwise out",
        ) from error
    RECOMPUTING.explain(error)


@contextmanager
def explaining(precision: Precision) -> Iterator[None]:
    """Within, errors of torch are explained."""
    try:
        yield
    except RuntimeError as error:
        explain(error, precision)
        raise


def set_kernels(job: Job) -> Callable[[], None]:
    """Choose the kernels that the job asks for; returns what puts everything back.

    fp32 means fp32: torch lets cuDNN round convolutions to TF32 unless it is told not to. Under
    `bitwise` kernels are deterministic and run on one thread. Deterministic mode also fills all
    memory that is handed out, to show reads of unwritten memory; that costs up to a tenth of a
    step and decides no bit, so it is left out.

    cuBLAS reads its variable in its first product, once in a process: it is set for every job on a
    device and stays, so that a job under `bitwise` can follow one without.
    """
    if job.device != "cpu":
        for name, value in WORKSPACE_OF_CUBLAS.items():
            os.environ.setdefault(name, value)
    undo = [_set_tf32(job.precision == "tf32")]
    if job.bitwise:
        undo.append(_set_deterministic())

    def put_back() -> None:
        for restore in undo:
            restore()

    return put_back


def _set_tf32(on: bool) -> Callable[[], None]:
    """Torch has an older and a newer set of switches. A program may have used either.

    The older getters raise once a newer switch says something else; then only the newer ones are
    put back.
    """
    backends: Any = torch.backends
    places = [backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn]
    host = [backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn]
    newer = [(place, place.fp32_precision) for place in (*places, *host)]
    older: list[tuple[Callable[[Any], None], Any]] = []
    with suppress(RuntimeError):
        older.append((_allow_tf32_in_cudnn, backends.cudnn.allow_tf32))
    with suppress(RuntimeError):
        older.append((torch.set_float32_matmul_precision, torch.get_float32_matmul_precision()))
    _allow_tf32_in_cudnn(on)
    torch.set_float32_matmul_precision("high" if on else "highest")
    for place in places:
        place.fp32_precision = "tf32" if on else "ieee"
    if not on:
        for place in host:
            place.fp32_precision = "ieee"

    def put_back() -> None:
        for switch, value in older:
            switch(value)
        for place, value in newer:
            place.fp32_precision = value

    return put_back


def _allow_tf32_in_cudnn(on: bool) -> None:
    torch.backends.cudnn.allow_tf32 = on


def _set_deterministic() -> Callable[[], None]:
    """Sums in one order: neither cuDNN nor cuBLAS chooses a kernel whose sums vary."""
    memory: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    searched = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    filled = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False
    torch.set_num_threads(1)

    def undo() -> None:
        torch.use_deterministic_algorithms(before[0])
        memory.fill_uninitialized_memory = filled
        torch.set_num_threads(before[1])
        torch.backends.cudnn.benchmark = searched

    return undo


# --- copies of weights in 16 bits ---------------------------------------------------------------

_MADE_OF = ("matmul", "mm", "bmm", "mv", "addmm", "addbmm", "baddbmm")
_CONVOLUTIONS = [f"conv{kind}{dims}d" for kind in ("", "_transpose") for dims in (1, 2, 3)]
PRODUCTS: frozenset[Any] = frozenset(
    [
        *(getattr(place, name) for name in _MADE_OF for place in (torch, Tensor)),
        *(getattr(torch, name) for name in _CONVOLUTIONS),
        F.linear,
        F.multi_head_attention_forward,
    ]
)
"""What autocast computes in 16 bits, of all weights with more than one axis that it is given."""

_LOOKS = (
    *("t", "transpose", "swapaxes", "permute", "movedim", "view", "reshape", "flatten", "narrow"),
    *("select", "unbind", "split", "chunk", "squeeze", "unsqueeze"),
)
VIEWS: frozenset[Any] = frozenset(
    [
        *(getattr(Tensor, name) for name in _LOOKS),
        *(getattr(torch, name) for name in _LOOKS if hasattr(torch, name)),
        *(vars(torch._C.TensorBase)[name].__get__ for name in ("T", "mT")),
        Tensor.__getitem__,
    ]
)


class Casts:
    """Copies of weights in 16 bits that stay as long as the weights do: from the forward of a unit
    to its end, and again in its backward.

    Autocast keeps its copies until the pass of the model ends, and autograd keeps them for
    backward: where weights are freed in between, each rank would hold all of them in 16 bits. Here
    a product gets a copy of the same bits, one for all uses in a pass. Its memory is freed after
    the forward of the unit, and filled again when the gradient of the unit's output comes.
    """

    def __init__(self, device: str) -> None:
        self.device, self._is_open = device, False
        self._of_pass: dict[int, tuple[Tensor, _Cast]] = {}  # by the id of the weight
        self._of_unit: list[_Cast] = []

    def follow(
        self, unit: nn.Module, tensors_of: Callable[[Any], Iterable[Tensor]]
    ) -> list[RemovableHandle]:
        """Called when `unit` has the hooks that gather and free its weights: they run before."""

        def close(_: nn.Module, inputs: object, output: Any) -> None:
            self._close(tensors_of(output))

        return [
            unit.register_forward_pre_hook(self._open),
            unit.register_forward_hook(close, always_call=True),
        ]

    def follow_passes(self, model: nn.Module) -> list[RemovableHandle]:
        """As those of autocast, copies are of one pass of the model."""
        return [
            model.register_forward_pre_hook(self._forget, prepend=True),
            model.register_forward_hook(self._forget, always_call=True),
        ]

    def cast(self, weight: Tensor) -> Tensor:
        """What a product reads in place of a weight, or of a view of one."""
        is_on = self._is_open and torch.is_autocast_enabled(self.device)
        if not is_on or weight.dtype is not torch.float32 or torch.compiler.is_compiling():
            return weight
        kind = torch.get_autocast_dtype(self.device)
        with_graph = weight.requires_grad and torch.is_grad_enabled()
        is_shared = with_graph and type(weight) is not _ViewOfWeight  # as in autocast
        known = self._of_pass.get(id(weight)) if is_shared else None
        if known is None or known[0].dtype is not kind:
            copy = weight.to(kind)
            known = copy, _Cast(weight.detach(), copy)
            if is_shared:
                self._of_pass[id(weight)] = known
            self._of_unit.append(known[1])
        elif not known[0].untyped_storage().nbytes():  # the unit is called again
            known[1].fill()
            self._of_unit.append(known[1])
        return known[0]

    def _forget(self, *_: object) -> None:
        self._of_pass.clear()

    def _open(self, *_: object) -> None:
        """Not where activations are computed again in backward: there it frees what it uses."""
        self._of_unit, self._is_open = [], torch._C._current_graph_task_id() == NO_BACKWARD

    def _close(self, outputs: Iterable[Tensor]) -> None:
        casts, self._of_unit, self._is_open = self._of_unit, [], False
        for cast in casts:
            cast.free()
        if casts and torch.is_grad_enabled():
            fill = partial(_fill, casts)
            for tensor in outputs:
                if tensor.requires_grad:
                    tensor.register_hook(fill)


class _Cast:
    """The memory of a copy of a weight, as long as anybody else holds it."""

    def __init__(self, weight: Tensor, copy: Tensor) -> None:
        self.weight, self.looks = weight, (copy.size(), copy.stride())
        self.kind, self.nbytes = copy.dtype, copy.untyped_storage().nbytes()
        self._memory = StorageWeakRef(copy.untyped_storage())

    def _storage(self) -> torch.UntypedStorage | None:
        return torch.UntypedStorage._new_with_weak_ptr(self._memory.cdata)

    def free(self) -> None:
        if (storage := self._storage()) is not None:
            storage.resize_(0)

    @torch.no_grad()
    def fill(self) -> None:
        storage = self._storage()
        if storage is not None and not storage.nbytes():
            storage.resize_(self.nbytes)
            copy = self.weight.new_empty(0, dtype=self.kind).set_(storage, 0, *self.looks)
            copy.copy_(self.weight)


def _fill(casts: list[_Cast], _: Tensor) -> None:
    for cast in casts:
        cast.fill()


class _ViewOfWeight(Tensor):
    """A view of a weight within its unit: autocast copies it for itself in each product."""

    casts: Casts


def with_casts(
    kind: type, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
) -> Any:
    """The `__torch_function__` of a weight with `casts`, and of its views."""
    kwargs = kwargs or {}
    with torch._C.DisableTorchFunctionSubclass():
        if function in PRODUCTS:
            args = tuple(map(_cast, args))
            kwargs = {name: _cast(value) for name, value in kwargs.items()}
        output = function(*args, **kwargs)
        if function in VIEWS and (casts := getattr(args[0], "casts", None)) is not None:
            for view in output if isinstance(output, (tuple, list)) else (output,):
                if type(view) is Tensor and view._is_view():
                    view.__class__ = _ViewOfWeight
                    view.casts = casts  # type: ignore[attr-defined]
        return output


_ViewOfWeight.__torch_function__ = classmethod(with_casts)  # type: ignore[assignment,method-assign]


def _cast(value: Any) -> Any:
    casts = getattr(value, "casts", None) if isinstance(value, Tensor) else None
    return value if casts is None or value.ndim < 2 else casts.cast(value)
