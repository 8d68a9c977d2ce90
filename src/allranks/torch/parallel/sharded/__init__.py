"""FSDP and ZeRO: each rank holds a part of the weights, gradients or optimizer state."""
