"""Python imports this at the start of each process that finds it on its path: arms what the test asked for."""

import os

if "SABOTAGE_ROOT" in os.environ or "SABOTAGE_POINT" in os.environ or "SABOTAGE_WITNESS" in os.environ:
    import sabotage

    sabotage.arm()
