import torch

# Small steps on two threads of a shared machine are many times slower than on one.
torch.set_num_threads(1)
