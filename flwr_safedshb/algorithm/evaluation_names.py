"""What a server asks of a node that evaluates a model privately, and what it answers.

Both are numbers in records; these are their names.
"""

from __future__ import annotations

# In the config of a message: that the answer is to be private, by the number of the
# round; the greatest loss that counts; and whether to count by class.
PRIVATE = "private-evaluation"
MAX_LOSS = "max-loss"
PER_CLASS = "per-class"

# In the metrics of a reply, all in examples: how many there are, how many answers were
# right, the sum of losses in units of the greatest; the deviation of the noise in these
# sums; and, for each class, three such sums.
NUM_EXAMPLES = "num-examples"
CORRECT, LOSS, NOISE_STD = "correct", "loss", "noise-std"
CLASS_COUNT, CLASS_CORRECT, CLASS_LOSS = "class-count", "class-correct", "class-loss"
SUMS = (CORRECT, LOSS)
CLASS_SUMS = (CLASS_COUNT, CLASS_CORRECT, CLASS_LOSS)

MIN_MAX_LOSS, MAX_MAX_LOSS = 1e-6, 1e6
