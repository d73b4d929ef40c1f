"""SMEA: the rule, and the search that makes it exact."""

from flwr_safedshb.aggregation.smea.rule import SMEA as SMEA
