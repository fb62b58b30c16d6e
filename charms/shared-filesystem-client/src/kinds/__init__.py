"""The filesystems: for each kind, how to plan its mount and what the machine needs for it.

A failed plan raises `mount_plan.MountError` or `NotYetError`, `presets.OptionError`,
`juicefs.JuicefsError` or `CommandError`; `judge.explained` turns all of them into a status.
"""
