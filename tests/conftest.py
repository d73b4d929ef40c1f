import torch
from hypothesis import settings

# Small steps on two threads of a shared machine are many times slower than on one.
torch.set_num_threads(1)

# The same examples in every run: a test that passed does not fail for another's change.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
