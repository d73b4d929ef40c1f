"""The models that the audit attacks.

`SUBJECTS` are models that people train; `mixing.SUBJECTS` are models in which examples
meet, for which the only right answers are a refusal or sums in which they do not.
"""
