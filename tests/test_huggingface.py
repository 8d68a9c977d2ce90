"""Models of transformers as tasks: equal to a loop by hand, and to one process."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import datasets
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

import huggingface_tasks as tasks
from allranks.errors import RequestError
from allranks.huggingface import CausalLM, SequenceClassification
from allranks.huggingface.labels import entities
from allranks.huggingface.packing import check_keeps_texts_apart
from allranks.huggingface.stages import stages_of
from allranks.huggingface.task import IGNORED
from allranks.job.job import Job
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.torch.parallel.expert.mixture import ExpertLayer
from allranks.torch.trainer import Trainer
from conftest import MODULES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),  # peft asks it
]

MODELS = (
    "GPT2",
    "LoRA",
    "Llama",
    "Qwen3",
    "Mixtral",
    "Bert",
    "BertLabels",
    "BertTags",
    "T5",
    "ViT",
)


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """A fork server that has imported these tasks once."""
    with ForkServer((*MODULES, "huggingface_tasks:__name__")) as running:
        yield running


def loss_by_hand(task: Any, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The mean that transformers computes of a batch, in its own precision."""
    given = {name: tensor for name, tensor in batch.items() if name != "labels"}
    logits, labels = model(**given).logits, batch["labels"]
    if isinstance(task, tasks.CausalLM):
        logits, labels = logits[:, :-1], labels[:, 1:]
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED)


IN_FLOAT32 = (
    "Llama",
    "Qwen3",
    "Mixtral",
    "T5",
)  # their norms compute in 32 bits, whatever comes in


@pytest.mark.slow(most=7)
@pytest.mark.parametrize("name", [*(name for name in MODELS if name != "Bert"), "SameMasks"])
def test_a_training_is_a_loop_by_hand(name: str) -> None:
    """20 AdamW steps on one batch of all rows, cut into shards and micro-batches."""
    task = getattr(tasks, name)(batch_size=48, shards=6)
    samples = task.train_data()
    batch = task.collate([samples[i] for i in range(len(samples))])
    job = Job(precision="fp64", strategy="single", micro_batch=5, steps=20)
    with Trainer(task, job) as trainer:
        model = task.model().double()
        model.load_state_dict(trainer.model.state_dict())
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=task.lr, weight_decay=0.0)
        for step, ours in enumerate(trainer.batches()):
            found = trainer.step(ours).loss
            for group in optimizer.param_groups:
                group["lr"] = task.lr * (1 - step / 20)
            optimizer.zero_grad()
            wanted = loss_by_hand(task, model, batch)
            wanted.backward()
            optimizer.step()
            within = 1e-8 if name in IN_FLOAT32 else 1e-12
            assert found == pytest.approx(wanted.item(), rel=within)


def takes(strategy: str, ranks: int, name: str) -> bool:
    return not (strategy == "1f1b" and name == "T5")  # it has two lists of layers


@pytest.fixture(scope="module")
def references() -> dict[Any, Any]:
    return {}


@pytest.mark.slow(most=11)
@pytest.mark.thinned(
    2,
    ("strategy", ("ddp", "zero2", "fsdp", "tensor", "1f1b")),
    ("ranks", (2, 3)),
    ("name", MODELS),
    where=takes,
)
def test_any_strategy_gives_what_one_process_gives(
    strategy: str, ranks: int, name: str, train: Callable[..., Any], references: dict[Any, Any]
) -> None:
    """Six steps in float64, each batch of texts of different lengths, in micro-batches."""
    program = f"huggingface_tasks:{name}"
    flags: dict[str, Any] = {"precision": "fp64", "steps": 6}
    if name not in references:
        references[name] = train(program, strategy="single", **flags)
    wanted, found = (
        references[name],
        train(program, strategy=strategy, ranks=ranks, micro_batch=3, **flags),
    )
    within = 1e-7 if name in IN_FLOAT32 else 1e-10
    ours, theirs = (load_file(run.run_dir / "weights.safetensors") for run in (found, wanted))
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        assert (ours[key] - tensor).norm() <= within * tensor.norm().clamp(min=1.0), key
    assert found.summary["eval"] == pytest.approx(wanted.summary["eval"], rel=within)


DROPPING, EXACT = ("dropout=0.1",), ("tied=False",)


@pytest.mark.slow(most=4)
@pytest.mark.parametrize(
    ("strategy", "ranks", "settings"),
    [
        ("ddp", 2, DROPPING),
        ("ddp", 4, EXACT),
        ("zero1", 3, DROPPING),
        ("fsdp", 2, DROPPING),
        ("fsdp", 4, EXACT),
        ("1f1b", 3, EXACT),  # it refuses a weight in two stages, and dropout by function
    ],
)
def test_one_digest(
    strategy: str,
    ranks: int,
    settings: tuple[str, ...],
    train: Callable[..., Any],
    references: dict[Any, Any],
) -> None:
    """Each micro-batch pads its texts to a length of its own."""
    flags: dict[str, Any] = {"bitwise": True, "steps": 3}
    if settings not in references:
        references[settings] = train("huggingface_tasks:GPT2", *settings, **flags)
    found = train("huggingface_tasks:GPT2", *settings, strategy=strategy, ranks=ranks, **flags)
    wanted = references[settings].summary["weights_sha256"]
    assert found.summary["weights_sha256"] == wanted


def difference(found: Any, wanted: Any) -> float:
    """The largest one of a weight between two runs, by its norm or by 1."""
    ours, theirs = (load_file(run.run_dir / "weights.safetensors") for run in (found, wanted))
    assert ours.keys() == theirs.keys()
    return max(
        float((ours[name] - tensor).norm() / tensor.norm().clamp(min=1.0))
        for name, tensor in theirs.items()
    )


@pytest.mark.slow(most=3)
@pytest.mark.parametrize(
    ("name", "ranks", "groups", "strategy"),
    [
        ("Llama", 2, 2, "tensor"),
        ("Llama", 3, 3, "tensor"),
        ("Llama", 3, 2, "tensor"),
        ("Qwen3", 3, 3, "tensor"),
        ("Mixtral", 2, 2, "tensor"),
        ("Qwen3", 4, 2, "fsdp:tensor=2"),
        ("Qwen3", 4, 2, "mesh:tensor=2,pipeline=2"),
    ],
)
def test_heads_and_features_are_cut_by_the_plan_of_the_model(
    name: str, ranks: int, groups: int, strategy: str, train: Callable[..., Any]
) -> None:
    flags: dict[str, Any] = {"precision": "fp64", "steps": 4}
    program, settings = f"huggingface_tasks:{name}", f"groups={groups}"
    wanted = train(program, settings, strategy="single", **flags)
    found = train(program, settings, strategy=strategy, ranks=ranks, micro_batch=3, **flags)
    assert difference(found, wanted) <= 1e-12


def test_a_block_is_the_sum_of_its_features() -> None:
    """An MLP that takes a mean over its features is none; those of other layers are."""
    before = torch.get_rng_state()
    for task in (tasks.Gemma3n(), tasks.Llama(), tasks.Qwen3()):
        with torch.device("meta"):
            model: Any = task.model()
        task.tensor_plan(model)
        for number, layer in enumerate(model.model.layers):
            is_none = isinstance(task, tasks.Gemma3n) and number == 0
            assert hasattr(layer.mlp, "tensor_plan") != is_none
            assert hasattr(layer.self_attn, "tensor_plan")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow(most=2)
@pytest.mark.parametrize(
    ("name", "ranks", "again"),
    [("Mixtral", 2, False), ("Mixtral", 4, True), ("Qwen3Moe", 3, False)],
)
def test_experts_are_dealt_out(
    name: str, ranks: int, again: bool, train: Callable[..., Any]
) -> None:
    """Some ranks have no samples in their last micro-batch, and some experts no tokens."""
    flags: dict[str, Any] = {"precision": "fp64", "steps": 4}
    program, settings = f"huggingface_tasks:{name}", ("batch_size=10", "shards=5")
    flags_of_ranks = {"ranks": ranks, "micro_batch": 1, "activation_checkpointing": again}
    wanted = train(program, *settings, strategy="single", **flags)
    found = train(program, *settings, strategy="expert", **flags, **flags_of_ranks)
    assert difference(found, wanted) <= 1e-12
    assert found.summary["eval"] == pytest.approx(wanted.summary["eval"], rel=1e-12)


def test_experts_without_a_choice_of_a_router_are_not_dealt_out() -> None:
    task = tasks.Llama4()
    with torch.device("meta"):
        model = task.model()
    assert any(name.endswith("gate_up_proj") for name, _ in model.named_parameters())
    task.deal_experts(model)
    assert not [module for module in model.modules() if isinstance(module, ExpertLayer)]


def test_an_expert_without_weights_is_refused() -> None:
    """transformers passes over the number after the last expert, or lets it be the identity."""
    model = tasks.Mixtral().model()
    tasks.Mixtral().deal_experts(model)
    experts = next(module for module in model.modules() if isinstance(module, ExpertLayer))
    comm = SimpleNamespace(rank=0)
    experts.exchange = cast(
        "Any",
        SimpleNamespace(
            comm=comm, is_idle=lambda: False, sizes=lambda counts, _: [counts.tolist()]
        ),
    )
    with pytest.raises(RequestError, match="above the last one, 3"):
        experts(torch.randn(2, 16), torch.tensor([[0, 1], [3, 4]]), torch.ones(2, 2))


def test_the_plan_of_the_model_sends_less(train: Callable[..., Any]) -> None:
    flags: dict[str, Any] = {"strategy": "tensor", "ranks": 2, "steps": 2}
    by_plan, alone = (
        train(f"huggingface_tasks:{name}", **flags).summary["sent_bytes"]["gradients"]
        for name in ("Llama", "LayersAlone")
    )
    assert by_plan < alone / 2


def test_dropout_by_function_is_drawn_for_all_heads(train: Callable[..., Any]) -> None:
    """Attention that drops is no block: its mask does not depend on the ranks."""
    flags: dict[str, Any] = {"precision": "fp64", "steps": 3}
    wanted, found = (
        train("huggingface_tasks:Llama", "dropout=0.2", strategy=strategy, ranks=ranks, **flags)
        for strategy, ranks in (("single", 1), ("tensor", 2))
    )
    assert difference(found, wanted) <= 1e-12


class Styled(tasks.Llama):
    def config(self) -> Any:
        config = super().config()
        plan = {**config.base_model_tp_plan, "layers.*.mlp.up_proj": "diagonal"}
        config.base_model_tp_plan = plan
        return config


def test_a_style_that_is_not_known_is_refused_by_name() -> None:
    task = Styled()
    with pytest.raises(RequestError, match=r"model.layers.\*.mlp.up_proj: 'diagonal'") as refused:
        task.tensor_plan(task.model())
    assert all(f"{part}:" in str(refused.value) for part in ("asked", "found", "why", "do"))


@pytest.mark.slow(most=1)
@pytest.mark.parametrize(
    ("strategy", "ranks"), [("ddp", 2), ("fsdp", 2), ("tensor", 2), ("1f1b", 2)]
)
def test_layers_that_are_computed_again_change_nothing(
    strategy: str, ranks: int, train: Callable[..., Any]
) -> None:
    """Dropout in attention and after each layer draws the same numbers the second time."""
    flags: dict[str, Any] = {"strategy": strategy, "ranks": ranks, "steps": 3, "micro_batch": 3}
    settings = *DROPPING, *EXACT
    wanted, found = (
        train("huggingface_tasks:GPT2", *settings, activation_checkpointing=again, **flags)
        for again in (False, True)
    )
    assert found.summary["weights_sha256"] == wanted.summary["weights_sha256"]


@pytest.mark.parametrize("name", ["GPT2", "Llama", "T5"])
def test_layers_that_are_computed_again_keep_their_inputs_alone(name: str) -> None:
    """What autograd keeps of a step in one process, in bytes, falls below 15 %."""

    def kept_bytes(*, again: bool) -> int:
        sizes = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            sizes[tensor.data_ptr()] = tensor.nbytes
            return tensor

        job = Job(strategy="single", steps=1, activation_checkpointing=again)
        with Trainer(getattr(tasks, name)(), job) as trainer:
            weights = {p.data_ptr() for p in trainer.model.parameters()}
            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                trainer.step(next(iter(trainer.batches())))
        return sum(size for place, size in sizes.items() if place not in weights)

    assert 0 < kept_bytes(again=True) < 0.15 * kept_bytes(again=False)


def test_masks_are_those_of_bert() -> None:
    """Of 4,000 tokens 15 % have a loss: 80 % of them are masked, 10 % random, 10 % as they were."""
    task = tasks.Bert()
    row = {"text": " ".join(tasks.WORDS * 100)}
    torch.manual_seed(0)
    task.max_length = 10_000
    sample = task.encode(row)
    tokens, labels = sample["input_ids"], sample["labels"]
    true = torch.tensor(task.tokenizer()(row["text"])["input_ids"])
    chosen = labels != IGNORED
    assert torch.equal(tokens[~chosen], true[~chosen])
    assert torch.equal(labels[chosen], true[chosen])
    masked = tokens[chosen] == task.tokenizer().mask_token_id
    kept = tokens[chosen] == true[chosen]
    shares = [float(part.float().mean()) for part in (chosen, masked, kept)]
    assert shares == pytest.approx([0.15, 0.8, 0.1], abs=0.04)


def test_scores_are_those_of_the_whole_evaluation() -> None:
    """F1 over batches of any size is that of all predictions at once."""
    torch.manual_seed(0)
    logits, true = torch.randn(50, 3), torch.randint(3, (50,))
    task = tasks.BertLabels()
    sums: dict[str, list[float]] = {}
    for part in (slice(0, 7), slice(7, 30), slice(30, 50)):
        found = task.metrics({"logits": logits[part]}, {"labels": true[part]})
        for name, (total, count) in found.items():
            was = sums.setdefault(name, [0.0, 0.0])
            sums[name] = [was[0] + float(total), was[1] + float(count)]
    scores = task.finalize({name: total / count for name, (total, count) in sums.items()})
    guessed = logits.argmax(dim=1)
    wanted = []
    for label in range(3):
        both = int(((guessed == label) & (true == label)).sum())
        precision, recall = both / int((guessed == label).sum()), both / int((true == label).sum())
        wanted.append(2 * precision * recall / (precision + recall))
    assert scores["f1"] == pytest.approx(sum(wanted) / 3)
    assert scores["accuracy"] == pytest.approx(float((guessed == true).float().mean()))


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        ("O B-X I-X O", [("X", 1, 3)]),
        ("B-X B-X I-Y", [("X", 0, 1), ("X", 1, 2), ("Y", 2, 3)]),
        ("I-X I-X", [("X", 0, 2)]),
        ("O O", []),
    ],
)
def test_entities(names: str, wanted: list[tuple[str, int, int]]) -> None:
    assert list(entities(names.split())) == wanted


@dataclass(kw_only=True)
class Nameless(SequenceClassification):
    pass


class Unpadded(tasks.BertLabels):
    def config(self) -> Any:
        config = super().config()
        config.pad_token_id = None
        return config

    def tokenizer(self) -> Any:
        made = super().tokenizer()
        made.pad_token = None
        return made


class Unmasked(tasks.Bert):
    def tokenizer(self) -> Any:
        made = super().tokenizer()
        made.mask_token = None
        return made


class Generated(tasks.GPT2):
    def rows(self, split: str) -> Any:
        return (row for row in super().rows(split))


class Blank(tasks.GPT2):
    def rows(self, split: str) -> Any:
        return [*super().rows(split), {"text": None, "other": ""}]


class Named(tasks.BertLabels):
    def rows(self, split: str) -> Any:
        return [{**row, "label": "yes"} for row in super().rows(split)]


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (tasks.GPT2(positions=8), "max_length=8"),
        (Unmasked(), "without a mask token"),
        (tasks.BertLabels(labels=2), "the model has 2 classes, 0 to 1"),
        (Named(), "'yes'"),
        (Blank(), "row 48 as a sample"),
    ],
)
def test_a_row_that_the_model_cannot_take_is_refused(task: Any, words: str) -> None:
    data = task.train_data()
    with pytest.raises(RequestError, match=words):
        [data[number] for number in range(len(data))]


@pytest.mark.parametrize(
    ("task", "method", "words"),
    [
        (Nameless(), "model", "no `name` is set"),
        (Nameless(), "train_data", "no `dataset` is set"),
        (tasks.GPT2(text="words"), "train_data", "columns: text, other"),
        (Unpadded(), "model", "without a pad token"),
        (Nameless(name="/nothere/model"), "config", "the configuration of /nothere/model"),
        (Nameless(name="/nothere/model"), "tokenizer", "the tokenizer of /nothere/model"),
        (Nameless(dataset="/nothere/rows"), "train_data", "the data set /nothere/rows"),
        (Generated(), "train_data", "a generator, without rows by number"),
    ],
)
def test_what_cannot_be_is_refused_in_four_parts(task: Any, method: str, words: str) -> None:
    with pytest.raises(RequestError, match=words) as refused:
        getattr(task, method)()
    assert all(f"{part}:" in str(refused.value) for part in ("asked", "found", "why", "do"))


def test_a_model_with_two_lists_of_layers_is_not_cut() -> None:
    with pytest.raises(RequestError, match=r"encoder.block \(3\), decoder.block \(3\)"):
        tasks.T5().stages(tasks.T5().model(), 2)


class Opened(tasks.GPT2):
    """Its first shard is empty."""

    def train_data(self) -> Any:
        samples = super().train_data()
        return SimpleNamespace(open=lambda shard, *_: iter([samples[shard]] * (shard > 0)))


def test_a_model_is_cut_by_the_first_sample_of_a_stream() -> None:
    assert len(Opened().stages(tasks.GPT2().model(), 3)) == 3


ODD_FORWARDS = {
    "a norm that is made before the layers and called after them": transformers.OPTConfig(
        hidden_size=16, word_embed_proj_dim=16, ffn_dim=32, num_attention_heads=4, vocab_size=44,
        num_hidden_layers=3, dropout=0.0, max_position_embeddings=16,
    ),
    "embeddings that are scaled in place": transformers.CTRLConfig(
        n_embd=16, dff=32, n_head=4, n_layer=3, vocab_size=44, n_positions=16,
        embd_pdrop=0.0, resid_pdrop=0.0,
    ),
    "a dropout that is made after the layers and called before them": transformers.PhiConfig(
        hidden_size=16, intermediate_size=32, num_attention_heads=4, num_hidden_layers=3,
        vocab_size=44, max_position_embeddings=16,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD_FORWARDS)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_stages_are_the_model_whatever_its_forward_does(name: str, device: str) -> None:
    config = ODD_FORWARDS[name]
    config.use_cache = False
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    inputs = {"input_ids": torch.randint(4, 40, (2, 9)), "attention_mask": torch.ones(2, 9).long()}
    if device == "meta":
        assert len(stages_of(copy.deepcopy(model).to("meta"), 3, inputs)) == 3
        return
    first, middle, last = stages_of(model, 3, inputs)
    with torch.no_grad():
        found = last(*middle(*first(**inputs)))["logits"]
        assert torch.equal(found, model(**inputs).logits)
    owned = [id(p) for stage in (first, middle, last) for p in stage.parameters()]
    assert {*owned} == {id(p) for p in model.parameters()}


class Odd(nn.Module):
    """Three layers, and a forward that a stage cannot have alone."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.inside = kind, nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, rows: torch.Tensor) -> Any:
        hidden, seen = self.inside(rows) if self.kind == "tied" else rows, []
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden)
            if self.kind == "again" and number == 0:
                hidden = layer(hidden)
            if self.kind == "between" and number == 1:
                hidden = self.inside(hidden)
            seen.append(hidden)
        if self.kind == "sum":
            hidden = hidden + seen[0]
        if self.kind == "tied":
            hidden = hidden @ self.inside.weight
        return SimpleNamespace(logits=hidden)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("again", "layer 0 is called in the place of layer 1"),
        ("between", "forward computes with an output of layer 1"),
        ("sum", "forward computes with an output of layer"),
        ("tied", "stages that compute something else"),
    ],
)
def test_a_forward_that_no_stage_can_have_is_refused(kind: str, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        stages_of(Odd(kind), 2, {"rows": torch.randn(2, 4)})
    assert len(stages_of(Odd("none"), 2, {"rows": torch.randn(2, 4)})) == 2


@pytest.fixture
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files in cache go into a folder of the test, and no thread of a progress bar stays."""
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
    for name in ("PYTORCH_NVML_BASED_CUDA_CHECK", "KMP_DUPLICATE_LIB_OK"):
        monkeypatch.setenv(name, "1")  # transformers and datasets set them
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.usefixtures("nothing_left")
def test_a_folder_is_read_in_32_bits(tmp_path: Path) -> None:
    """A model that was saved in bfloat16 is trained in float32, with the same values."""
    task = tasks.GPT2()
    task.model().to(torch.bfloat16).save_pretrained(tmp_path)
    tasks.tokenizer().save_pretrained(tmp_path)

    @dataclass(kw_only=True)
    class Saved(CausalLM):
        def rows(self, split: str) -> Any:
            return tasks.texts(split)

    read = Saved(name=str(tmp_path)).model()
    saved = load_file(tmp_path / "model.safetensors")
    weights = dict(read.named_parameters())
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert all(torch.equal(weights[name], tensor.float()) for name, tensor in saved.items())
    assert len(Saved(name=str(tmp_path)).train_data()[0]["input_ids"]) > 1
    scratch = Saved(name=str(tmp_path), from_scratch=True).model()
    assert not torch.equal(scratch.lm_head.weight, read.lm_head.weight)


@pytest.mark.usefixtures("nothing_left")
def test_rows_come_from_a_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of two splits, as `datasets` reads it."""
    monkeypatch.chdir(tmp_path)  # `datasets` looks for names of splits in the whole path
    tasks.save("model", "rows")

    @dataclass(kw_only=True)
    class Read(CausalLM):
        def config(self) -> Any:
            return tasks.GPT2().config()

        def tokenizer(self) -> Any:
            return tasks.tokenizer()

    read = Read(dataset="rows")
    assert (len(read.train_data()), len(read.eval_data())) == (48, 12)
    wanted = tasks.GPT2().train_data()[5]["input_ids"]
    assert torch.equal(read.train_data()[5]["input_ids"], wanted)
    stream = Read(dataset="rows", streaming=True)
    assert len(stream.eval_data()) == 12
    shards = [list(stream.train_data().open(k, 0, 0, 0)) for k in range(stream.shards)]
    assert sum(map(len, shards)) == 48 and torch.equal(shards[5][0]["input_ids"], wanted)
    assert len(stream.stages(tasks.GPT2().model(), 3)) == 3
    for streaming in (False, True):
        with pytest.raises(RequestError, match="columns: text"):
            Read(dataset="rows", text="words", streaming=streaming).train_data()


@pytest.mark.usefixtures("nothing_left")
def test_a_stream_goes_on_where_it_was_on_other_ranks(
    tmp_path: Path, train: Callable[..., Any]
) -> None:
    """10,000 texts of 8 files, stopped three times within an epoch."""
    weights = []
    for ends in ([(1, 25)], [(2, 7), (3, 12), (1, 18), (4, 25)]):
        folder = tmp_path / f"texts-{len(ends)}"
        folder.mkdir()
        tasks.write_numbers(folder, files=8, rows=1250)
        flags: dict[str, Any] = {"bitwise": True, "run_dir": str(folder / "run")}
        for ranks, steps in ends:
            found = train(
                "huggingface_tasks:Streamed",
                f"folder={folder}",
                ranks=ranks,
                steps=steps,
                checkpoint_every=100,
                **flags,
            )
        weights.append(found.summary["weights_sha256"])
        read = [int(n) for file in folder.glob("read-*") for n in file.read_text().split()]
        assert len(read) == 10_000 and {*read} == {*range(10_000)}
    assert weights[0] == weights[1]


# --- packing -------------------------------------------------------------------------------------


def norm_in_float64(norm: Any, hidden: torch.Tensor) -> torch.Tensor:
    """That of Llama and Qwen3, which computes in 32 bits, in the precision of its input."""
    scale = torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    result: torch.Tensor = norm.weight * hidden * scale
    return result


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        ("GPT2", "sdpa"),
        ("GPT2", "eager"),
        ("Llama", "sdpa"),
        ("Llama", "eager"),
        ("Qwen3", "sdpa"),
    ],
)
def test_packed_is_padded(name: str, attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss and the gradients of a global batch of 48 texts, in float64."""
    for module in ("llama.modeling_llama.Llama", "qwen3.modeling_qwen3.Qwen3"):
        monkeypatch.setattr(f"transformers.models.{module}RMSNorm.forward", norm_in_float64)
    padded, packed = (getattr(tasks, name)(packed=tokens) for tokens in (0, 16))
    for task in (padded, packed):
        task._config._attn_implementation = attention
    model = padded.model().double()
    check_keeps_texts_apart(model, padded._config)
    found = []
    for task in (padded, packed):
        data = task.train_data()
        batch = task.collate([data[number] for number in range(len(data))])
        weight = task.weight(batch)
        loss = (task.loss(model(**task.inputs(batch)), batch) * weight).sum() / weight.sum()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        found.append((int(weight.sum()), loss, *gradients))
    assert len(packed.train_data()) < len(padded.train_data()) * 0.7
    exact = attention == "sdpa" or name == "GPT2"  # the others' eager softmax has 32 bits
    assert found[0][0] == found[1][0]
    for ours, theirs in zip(found[0][1:], found[1][1:], strict=True):
        assert (ours - theirs).norm() <= (1e-10 if exact else 1e-6) * theirs.norm()


def text_numbers(block: Any) -> list[list[int]]:
    """The tokens of each text of a block."""
    starts = (block["position_ids"] == 0).nonzero().flatten().tolist()
    numbers = block["input_ids"].tolist()
    ends = [*starts[1:], len(numbers)]
    return [numbers[start:end] for start, end in zip(starts, ends, strict=True)]


def test_blocks_have_every_text_once_and_long_ones_in_pieces() -> None:
    task = tasks.GPT2(packed=8, split_texts=True)
    data = task.train_data()
    blocks = [data[number] for number in range(len(data))]
    assert all(len(block["input_ids"]) <= 8 for block in blocks)
    texts = [task.encode(row)["input_ids"].tolist() for row in tasks.texts("train")]
    pieces = [text[at : at + 8] for text in texts for at in range(0, len(text), 8)]
    assert [text for block in blocks for text in text_numbers(block)] == pieces
    for block in blocks:
        first = block["position_ids"] == 0
        assert torch.equal(block["labels"], block["input_ids"].masked_fill(first, IGNORED))


@pytest.mark.usefixtures("nothing_left")
def test_a_shard_of_a_stream_packs_its_own_texts() -> None:
    """The blocks go on from a state, which has the text that did not fit."""
    rows = [{"text": row["text"]} for row in tasks.texts("train")]

    @dataclass(kw_only=True)
    class Packed(tasks.GPT2):
        def rows(self, split: str) -> Any:
            return datasets.IterableDataset.from_generator(lambda: iter(rows))

    task = Packed(packed=12, shards=2)
    stream, texts = task.train_data(), []
    for shard in range(2):
        blocks = [block["input_ids"].tolist() for block in stream.open(shard, 0, 0, 0)]
        texts += [t for block in stream.open(shard, 0, 0, 0) for t in text_numbers(block)]
        for at in (1, 5, len(blocks)):
            first = stream.open(shard, 0, 0, 0)
            for _ in range(at):
                next(first)
            state = json.loads(json.dumps(first.state_dict()))
            second = stream.open(shard, 0, 0, 0)
            second.load_state_dict(state)
            for after in (second, stream.open(shard, 0, 0, at)):
                assert [block["input_ids"].tolist() for block in after] == blocks[at:]
    assert sorted(texts) == sorted(task.encode(row)["input_ids"].tolist() for row in rows)


@pytest.mark.slow(most=2)
@pytest.mark.parametrize(("strategy", "ranks"), [("ddp", 3), ("fsdp", 2), ("1f1b", 3)])
def test_packed_has_one_digest(
    strategy: str, ranks: int, train: Callable[..., Any], references: dict[Any, Any]
) -> None:
    settings, flags = ("packed=16", "tied=False"), {"bitwise": True, "steps": 3}
    if settings not in references:
        references[settings] = train("huggingface_tasks:GPT2", *settings, **flags)
    found = train("huggingface_tasks:GPT2", *settings, strategy=strategy, ranks=ranks, **flags)
    assert found.summary["weights_sha256"] == references[settings].summary["weights_sha256"]


def test_what_cannot_be_packed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match=r"(?s)row 2, the longest, .*--set split_texts=true"):
        tasks.GPT2(packed=8).train_data()
    with pytest.raises(RequestError, match="a block that has no target"):
        tasks.GPT2(packed=1).train_data()
    with pytest.raises(RequestError, match="a text may have 8"):
        tasks.GPT2(packed=16, positions=8).train_data()
    bloom = transformers.BloomConfig(vocab_size=44, hidden_size=16, n_layer=2, n_head=4)
    with pytest.raises(RequestError, match="for a BloomForCausalLM"):
        check_keeps_texts_apart(transformers.AutoModelForCausalLM.from_config(bloom), bloom)
    mask = "transformers.masking_utils.find_packed_sequence_indices"
    monkeypatch.setattr(mask, lambda positions: None)
    for task in (tasks.GPT2(packed=16), tasks.Llama(packed=16)):
        with pytest.raises(RequestError, match="a text before it changes an output") as refused:
            task.model()
        assert all(f"{part}:" in str(refused.value) for part in ("asked", "found", "why", "do"))


@pytest.mark.usefixtures("nothing_left")
def test_a_script_of_trainer_is_watched_unchanged(tmp_path: Path) -> None:
    """Every rank reads all samples: `check` names the line that makes the loader."""
    script = Path(__file__).parent / "watched" / "trainer_of_transformers.py"
    check = [sys.executable, "-m", "allranks.cli.main", "check", "--ranks", "2"]
    command = [*check, "--", sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 5, done.stdout + done.stderr
    assert "trainer_of_transformers.py:16: same-samples-on-ranks" in done.stdout
