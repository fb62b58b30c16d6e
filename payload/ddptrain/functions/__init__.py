"""Python functions as jobs: pickled on the login node, called by every rank, results read back.

The only room that knows the command `ddp`. It needs cloudpickle and Python's standard library
alone, as it is imported wherever a user's program or notebook runs.
"""
