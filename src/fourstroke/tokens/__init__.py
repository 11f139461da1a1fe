"""Between messages and tokens: rendering a prompt, and cutting an episode into training rows."""

from fourstroke.tokens.canary import canary_ids
from fourstroke.tokens.render import Renderer
from fourstroke.tokens.rows import episode_rows, num_shared

__all__ = ["Renderer", "canary_ids", "episode_rows", "num_shared"]
