"""DeepSpeed 0.19.8: a configuration that does not say `gradient_clipping` clips at 1.

Until 0.19 the default was 0, no clipping. Prints the length of the gradient, and of the update that
SGD with a rate of 1 makes of it; `"gradient_clipping": 0.0` makes both equal.
"""

import os
import tempfile

import torch
from torch import nn
from torch.optim import SGD

os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
import deepspeed

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # a minute of compiling
store = f"file://{tempfile.mkdtemp()}/store"
torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
torch.manual_seed(0)
module, inputs = nn.Linear(3, 1, bias=False), 10 * torch.ones(8, 3)
before = module.weight.detach().clone()
module(inputs).square().mean().backward()
wanted = module.weight.grad.norm().item()
module.zero_grad()
config = {"train_micro_batch_size_per_gpu": 8, "zero_allow_untested_optimizer": True}
engine, *_ = deepspeed.initialize(
    model=module,
    optimizer=SGD(module.parameters(), lr=1.0),
    config=config,
    dist_init_required=False,
)
engine.backward(engine(inputs).square().mean())
engine.step()
moved = (module.weight.detach() - before).norm().item()
print(f"the gradient has the length {wanted:.3g}, the update {moved:.3f}")
