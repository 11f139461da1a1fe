"""The training engine: a few verbs over a model, blind to reinforcement learning; the loss is handed to it."""
