"""The signals that may stop a run, which a process holds back before it reads its configuration."""

STOP_SIGNALS = ("TERM", "USR1", "USR2", "HUP", "QUIT", "XCPU")
