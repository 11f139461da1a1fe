"""Inference engines: token ids in, token ids and log-probabilities out, under a known weight version.

Importing this room loads no engine; ``vllm`` is imported when one starts. May not know of tasks, rewards or trainers.
"""
