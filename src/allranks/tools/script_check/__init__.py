"""`check -- python train.py`: records what a script does on each rank, and reports faults."""
