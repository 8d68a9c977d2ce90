"""Lightning Fabric 2.6.6: with precision="64-true" the loss is computed in float32.

`convert_output` of its precision gives what the model returns in torch's default type, which is
float32 unless the script has set another. Prints the relative difference of the gradient.
"""

import torch
from lightning_fabric import Fabric
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
module = nn.Linear(8, 4).double()
inputs, labels = torch.randn(32, 8, dtype=torch.float64), torch.arange(32) % 4
F.cross_entropy(module(inputs), labels).backward()
wanted = module.weight.grad.clone()

fabric = Fabric(accelerator="cpu", devices=1, precision="64-true")
module.zero_grad()
model = fabric.setup(module)
output = model(inputs)
fabric.backward(F.cross_entropy(output, labels))
difference = ((module.weight.grad - wanted).norm() / wanted.norm()).item()
print(f"the model gives {output.dtype}; its gradient differs by {difference:.1e}")
