"""Python functions as jobs: pickled on the login node, called by every rank, results read back.

The only room that knows the command `ddp`. It needs only cloudpickle and Python's standard library,
because it is imported wherever a user's program or notebook runs.
"""
