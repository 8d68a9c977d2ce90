"""transformers 5.24.0: the Trainer multiplies losses that are means by the number of ranks.

A classifier of two classes that knows nothing has a loss of ln 2 = 0.69. This prints what
`evaluate` gives on one rank and on two, with `average_tokens_across_devices`, which is the default,
and without it. It needs transformers and accelerate, and starts itself by torchrun.
"""

import os
import subprocess
import sys
import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


def evaluate(average: bool) -> None:
    """On the ranks that torchrun has started."""
    torch.manual_seed(0)
    rows = [{"input_ids": torch.randint(3, 99, (8,)), "labels": i % 2} for i in range(24)]
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 64}
    model = BertForSequenceClassification(
        BertConfig(vocab_size=100, num_attention_heads=2, **sizes)
    )
    arguments = TrainingArguments(
        os.environ["OUT"], average_tokens_across_devices=average, use_cpu=True, report_to=[]
    )
    loss = Trainer(model=model, args=arguments, eval_dataset=rows).evaluate()["eval_loss"]
    if os.environ["RANK"] == "0":
        ranks = os.environ["WORLD_SIZE"]
        print(f"{ranks} rank(s), average_tokens_across_devices={average}: eval_loss {loss:.2f}")
    if torch.distributed.is_initialized():  # a rank that only leaves may take the other down
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        evaluate(sys.argv[1] == "True")
    else:
        with tempfile.TemporaryDirectory() as folder:
            for average in (True, False):
                for ranks in (1, 2):
                    start = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
                    command = [*start, f"--nproc-per-node={ranks}", __file__, str(average)]
                    subprocess.run(command, env={**os.environ, "OUT": folder}, check=True)
