"""Fine-tunes a language model of the hub with LoRA. The export is the adapter, for peft.

allranks train fine_tune_lora.py --ranks 4 --strategy fsdp --checkpoint-every 100 --run-dir lora
allranks checkpoints export lora --to adapter --format huggingface
allranks train fine_tune_lora.py --set name=FOLDER --set dataset=FOLDER
"""

from dataclasses import dataclass

from peft import LoraConfig, get_peft_model

from allranks.huggingface import CausalLM


@dataclass(kw_only=True)
class FineTune(CausalLM):
    name: str = "openai-community/gpt2"
    dataset: str = "stanfordnlp/imdb"
    batch_size: int = 32
    lr: float = 2e-4
    clip_norm: float | None = 1.0
    rank: int = 8

    def model(self):
        adapter = LoraConfig(r=self.rank, target_modules="all-linear", task_type="CAUSAL_LM")
        return get_peft_model(super().model(), adapter)
