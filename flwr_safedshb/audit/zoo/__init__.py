"""The models that the audit attacks, one tuple `MODELS` a module.

`layers`, `pretrained`, `randomised` and `raising` are models that people train. In
those of `mixing` examples meet, for which the only right answers are a refusal or sums
in which they do not. Those of `state` work in place, or keep values of examples.
"""
