"""The best weights of a training, not the last: kept, marked, exported, loaded, and used.

allranks train digits --epochs 4 --eval-every epoch --best max:accuracy --run-dir runs/best
allranks checkpoints list runs/best                                  # marks the best one
allranks checkpoints export runs/best --best --to best.safetensors
python best_weights.py best.safetensors
"""

import sys

import torch
from safetensors.torch import load_file

from allranks.programs.digits import Digits


def predict(weights: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What the model says of the digits that were held out, and what they are: (samples,) each."""
    task = Digits()
    model = task.model()
    model.load_state_dict(load_file(weights))
    images, labels = task.eval_data()
    with torch.inference_mode():
        return model.eval()(images).argmax(dim=1), labels


if __name__ == "__main__":
    said, labels = predict(sys.argv[1])
    print(f"{(said == labels).double().mean():.4f} of {len(labels)} digits are told right")
    print("the first ten:", said[:10].tolist())
