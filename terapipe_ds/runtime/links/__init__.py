"""How tensors travel between parts: channels, the groups behind them, what is on its way."""
