"""`allranks replay --save-step FILE`: one step as a script that needs torch alone.

Each pass of the step, forward and backward, is traced to the operators of torch that it calls, with
the tensors that it reads: so the file knows neither the task nor this package. It adds up the
gradients of the passes in the order of the step, and compares loss and gradients with those that
the step had, bit by bit.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from allranks.errors import RequestError
from allranks.strategies.reduction_tree import merges
from allranks.torch.data.batch import Batch, MicroBatch
from allranks.torch.data.collate import copied
from allranks.torch.model.weights import content_of
from allranks.torch.step.probes import StepProbe
from allranks.torch.step.step import SharedStep
from allranks.torch.witness.recompute import leaving_no_trace

HEAD = '''"""One step of a training: python FILE computes its loss and its gradients.

It needs torch alone, and was written by `allranks replay --save-step`.
"""

import base64
import hashlib
import zlib
from types import SimpleNamespace

import torch
from torch import device, inf, nan  # noqa: F401

torch.set_num_threads(1)
STEP, PROGRAM, TORCH = {step!a}, {program!a}, {torch!a}
'''
TAIL = '''

def step():
    """The loss of the step, and the gradient of each weight, before it is clipped."""
    stack = []
    for passes, complete in LEAVES:
        leaf = [torch.zeros_like(tensor) for tensor in LIKE]
        for program, constants in passes:
            tensors = {{name: SAVED[key].clone() for name, key in constants.items()}}
            for total, tensor in zip(leaf, program(SimpleNamespace(**tensors), *weights())):
                if tensor is not None:
                    total += tensor
        stack.append(leaf)
        for _ in range(complete):
            last = stack.pop()
            stack.append([a + b for a, b in zip(stack.pop(), last)])
    ((loss, weight, *gradients),) = stack
    factor = {factor}
    return float(loss) / float(weight), [g * factor if factor != 1 else g for g in gradients]


def weights():
    """The weights before the step."""
    return [SAVED[f"weight/{{name}}"].clone().requires_grad_() for name in NAMES]


def digest(tensor):
    content = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(bytes(content.tolist())).hexdigest()


def saved():
    """Each tensor by its name, from its bytes."""
    content, tensors = bytearray(zlib.decompress(base64.b64decode(CONTENT))), {{}}
    for name, (dtype, shape, begin, end) in PLACES.items():
        flat = torch.empty(0, dtype=dtype)
        if end > begin:
            flat = torch.frombuffer(content[begin:end], dtype=dtype)
        tensors[name] = flat.view(shape)
    return tensors


SAVED = saved()
LIKE = [torch.zeros(()), torch.zeros(()), *weights()]

if __name__ == "__main__":
    print(f"step {{STEP}} of {{PROGRAM!a}}, made with torch {{TORCH}}")
    loss, gradients = step()
    print(f"loss {{loss!r}}, of the run {{LOSS!r}}")
    of_run = [DIGESTS.get(name, digest(torch.zeros_like(g))) for name, g in zip(NAMES, gradients)]
    equal = [g for g, of_it in zip(gradients, of_run) if digest(g) == of_it]
    print(f"{{len(equal)}} of {{len(NAMES)}} gradients have the bits of the run")
    raise SystemExit(len(equal) != len(NAMES))
'''
AUTO_NAMESPACES = ("aten", "prims", "prim")


class SavedStep(StepProbe):
    """The script of a step, or of one shard of it: traced before, written when its loss is known.

    As the probe of the step it digests the gradients, for another probe that may be there already.
    """

    def __init__(
        self,
        path: Path,
        step: SharedStep,
        batch: Batch,
        program: str,
        shards: int,
        only_shard: int | None = None,
    ) -> None:
        self.path, self.step, self.batch, self.program = path, step, batch, program
        self.only_shard = only_shard
        if step.batch_loss is not None or step.regularizers.is_there or step.loss_scale is not None:
            raise self._refused(
                "a loss over the batch, a regularizer or a loss scale",
                "the script adds up passes, and knows nothing around them",
            )
        pairs = zip(step.names, step.parameters, strict=True)
        self._saved = {f"weight/{name}": p.detach().clone() for name, p in pairs}
        self._programs: dict[str, str] = {}
        self._leaves: list[str] = []
        self._count = 0
        spans = tuple((leaf.shards.start, leaf.shards.stop) for leaf in batch.leaves)
        with leaving_no_trace(step, []):
            counts = merges(spans, shards) if only_shard is None else bytes(1)
            for leaf, complete in zip(batch.leaves, counts, strict=True):
                passes = [self._traced(micro) for micro in leaf.micros]
                self._leaves.append(f"([{', '.join(passes)}], {complete})")
        self._digests: dict[str, str] = {}
        self._probe, step.probe = step.probe, self

    def gradients(self, stage: str, names: list[str], tensors: list[Tensor | None]) -> None:
        """Before they are clipped: the gradients that the script has to compute."""
        self.step.probe = self._probe
        for name, tensor in zip(names, tensors, strict=True):
            if tensor is not None:
                self._digests[name] = hashlib.sha256(content_of(tensor)).hexdigest()
        if self._probe is not None:
            self._probe.gradients(stage, names, tensors)

    def _refused(self, problem: str, why: str, do: str = "look at it with --pdb") -> RequestError:
        return RequestError(asked=f"--save-step {self.path}", found=problem, why=why, do=do)

    def _traced(self, micro: MicroBatch) -> str:
        """A pass in the script: its function, and where its tensors are."""
        step, scale = self.step, 1.0 / self.batch.nominal

        def one_pass(*weights: Tensor) -> list[Tensor | None]:
            with _in_place(step.model, step.names, weights):
                losses, counts = step.losses_of(step.output(self.batch, micro), micro)
            total = losses.sum()
            start = total.new_full((), scale)
            of = torch.autograd.grad(total, weights, start, allow_unused=True)
            weight = total.new_full((), float(losses.numel())) if counts is None else counts.sum()
            return [total.detach(), weight, *of]

        weights = [p.detach().clone().requires_grad_() for p in step.parameters]
        try:
            graph = make_fx(one_pass)(*weights)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"[:300]
            raise self._refused(
                problem, "a pass is traced with its tensors, operator by operator"
            ) from error
        constants: dict[str, str] = {}
        for node in graph.graph.nodes:
            if node.op == "get_attr":
                key = f"{self._count}/{node.target}"
                constants[node.target] = key
                self._saved[key] = getattr(graph, node.target).detach().clone()
            elif node.op == "call_function" and (why := _only_here(node.target)):
                raise self._refused(f"the operator {node.target}", why)
        name = self._programs.setdefault(graph.code, f"pass_{len(self._programs)}")
        self._count += 1
        return f"({name}, {constants!r})"

    def write(self, loss: float) -> None:
        """Write the script; `loss` is that of the step. Raises `RequestError` if it cannot be."""
        content, places = bytearray(), []
        for name, tensor in self._saved.items():
            begin = len(content)
            content += content_of(tensor)
            form = f"({tensor.dtype}, {tuple(tensor.shape)}, {begin}, {len(content)})"
            places.append(f"{name!r}: {form}")
        text = base64.b64encode(zlib.compress(content)).decode()
        lines = [text[start : start + 96] for start in range(0, len(text), 96)]
        of_shard = "" if self.only_shard is None else f", shard {self.only_shard} alone,"
        values = {"step": f"{self.batch.index + 1}{of_shard}", "program": self.program}
        values["torch"] = torch.__version__
        factor = f"{self.batch.nominal} / float(weight)" if self.only_shard is None else "1.0"
        programs = [
            code.replace("def forward(", f"def {n}(", 1) for code, n in self._programs.items()
        ]
        rows = {
            "NAMES": repr(list(self.step.names)),
            "LOSS": repr(loss),
            "DIGESTS": repr(self._digests),
            "LEAVES": "[\n    " + ",\n    ".join(self._leaves) + ",\n]",
            "PLACES": "{\n    " + ",\n    ".join(places) + ",\n}",
            "CONTENT": '"""\n' + "\n".join(lines) + '\n"""',
        }
        parts = [HEAD.format(**values), *programs, *(f"{n} = {v}" for n, v in rows.items())]
        try:
            with open(self.path, "x", encoding="utf-8") as file:
                file.write("\n".join([*parts, TAIL.format(factor=factor)]))
        except OSError as error:
            problem = error.strerror or type(error).__name__
            why = "the script is a new file, and replaces none"
            raise self._refused(problem, why, "name another file") from None


def _only_here(target: Any) -> str:
    """Why a script cannot call an operator again; "" if it can."""
    if not isinstance(target, torch._ops.OpOverload):
        return ""
    if torch.Tag.nondeterministic_seeded in target.tags:
        return "it draws random numbers that the script could not draw again"
    return "" if target.namespace in AUTO_NAMESPACES else "torch alone does not have it"


@contextmanager
def _in_place(model: nn.Module, names: list[str], tensors: tuple[Tensor, ...]) -> Iterator[None]:
    """Within, the model has these tensors for parameters, and copies of its buffers."""
    there = {id(model.get_parameter(n)): t for n, t in zip(names, tensors, strict=True)}
    before = [
        (module, dict(module._parameters), dict(module._buffers)) for module in model.modules()
    ]
    try:
        for module, parameters, buffers in before:
            for name, parameter in parameters.items():
                if id(parameter) in there:
                    new: Any = there[id(parameter)]
                    module._parameters[name] = new
            for name, buffer in buffers.items():
                module._buffers[name] = copied(buffer)
        yield
    finally:
        for module, parameters, buffers in before:
            module._parameters.update(parameters)
            module._buffers.update(buffers)
