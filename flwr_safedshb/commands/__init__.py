"""The commands of `safedshb`, one file each.

A file has a docstring, whose first line is the command's help and whose rest, with
examples, stands below it; ``add(parser)``, which adds the command's arguments; and
``run(arguments)``, which does the work and returns the exit code. Heavy imports belong
inside `run`, so that ``safedshb --help`` answers at once. A file whose name begins with
an underscore is no command.
"""
