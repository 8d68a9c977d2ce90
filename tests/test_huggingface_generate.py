"""Texts that models of transformers write in an evaluation, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers

import huggingface_tasks as tasks
from allranks.errors import RequestError
from allranks.huggingface.task import IGNORED
from allranks.job.job import Job
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.torch.trainer import Trainer
from conftest import MODULES

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """A fork server that has imported these tasks once."""
    with ForkServer((*MODULES, "huggingface_tasks:__name__")) as running:
        yield running


@torch.no_grad()
def written(model: Any, sample: Any, count: int) -> list[int]:
    """The tokens after one sample, each from a pass over all tokens before it, unpadded."""
    tokens, new = sample["input_ids"][None], torch.empty(1, 0, dtype=torch.int64)
    prompt = tokens[:, : int((sample["labels"] == IGNORED).sum())]
    for _ in range(count):
        if model.config.is_encoder_decoder:
            inputs = {"input_ids": tokens, "decoder_input_ids": torch.cat([START, new], dim=1)}
        else:
            inputs = {"input_ids": torch.cat([prompt, new], dim=1)}
        new = torch.cat([new, model(**inputs).logits[:, -1:].argmax(dim=2)], dim=1)
    return new[0].tolist()


START = torch.tensor([[1]])  # what the decoder of T5 begins with


@pytest.mark.parametrize(
    ("name", "different"),
    [("WritingGPT2", 8), ("WritingLlama", 8), ("WritingQwen3", 4), ("WritingT5", 4)],
)
def test_a_text_in_a_batch_is_that_of_its_sample_alone(name: str, different: int) -> None:
    """In float64, with prompts of different lengths, and weights that make texts different."""
    task = getattr(tasks, name)()
    torch.manual_seed(0)
    model = task.model().double().eval()
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.5)
    data = task.eval_data()
    samples = [data[i] for i in range(len(data))]
    batch = task.collate(samples)
    with torch.no_grad():
        output = task.eval_output({}, batch, lambda batch: model(**task.inputs(batch)))
    wanted = [written(model, sample, task.max_new_tokens) for sample in samples]
    assert output["generated"].tolist() == wanted
    assert len({tuple(text) for text in wanted}) >= different


@pytest.mark.parametrize(
    ("name", "strategy", "ranks"),
    [
        ("WritingGPT2", "ddp", 3),
        ("WritingLlama", "fsdp", 3),
        ("WritingLlama", "tensor", 2),
        ("WritingT5", "fsdp", 2),
    ],
)
def test_metrics_are_those_of_one_rank(
    name: str, strategy: str, ranks: int, train: Callable[..., Any]
) -> None:
    """10 rows are evaluated in five chunks, so ranks have different numbers of them."""
    flags: dict[str, Any] = {"precision": "fp64", "steps": 1}
    with Trainer(getattr(tasks, name)(), Job(strategy="single", **flags)) as trainer:
        trainer.step(next(iter(trainer.batches())))
        wanted = trainer.evaluate()
    result = train(f"huggingface_tasks:{name}", strategy=strategy, ranks=ranks, **flags)
    assert result.summary["eval"] == pytest.approx(wanted, rel=1e-8)
    assert wanted["distance"] > 0


def test_texts_end_with_their_end_token() -> None:
    task = tasks.WritingGPT2()
    words = task.tokenizer()("w5 w6 [EOS] w7")["input_ids"]
    tokens = torch.tensor([words, [-100, *words[:2], -100]])
    assert task._texts(tokens) == ["w5 w6", "w5 w6"]


class Bloom(tasks.WritingGPT2):
    def config(self) -> Any:
        return transformers.BloomConfig(hidden_size=16, n_layer=2, n_head=4, **tasks.SIZES)


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (tasks.GPT2(max_new_tokens=2), "a prompt of 0 tokens in row 0"),
        (tasks.WritingLlama(max_new_tokens=14), "a model of 16 positions"),
        (tasks.WritingGPT2(packed=16), "packed"),
        (Bloom(), "BloomForCausalLM, which takes no position_ids"),
    ],
)
def test_a_prompt_that_cannot_be_continued_is_refused(task: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words) as refused:
        task.eval_data()
    assert all(f"{part}:" in str(refused.value) for part in ("asked", "found", "why", "do"))


def test_a_pipeline_is_refused() -> None:
    task = tasks.WritingGPT2()
    with pytest.raises(RequestError, match="max_new_tokens=5 in a pipeline"):
        task.stages(task.model(), 2)
