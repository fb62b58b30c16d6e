"""The filesystems: for each kind how a mount of it is planned and what the machine needs for it.

What cannot be planned raises `mount_plan.MountError` or `NotYetError`, `presets.OptionError`,
`juicefs.JuicefsError` or `CommandError`, all of which `judge.explained` turns into a status.
"""
