"""Python imports this at the start of each process that finds it on its path: arms what the test asked for."""

import sabotage

sabotage.arm()
