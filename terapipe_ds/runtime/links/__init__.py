"""Carry tensors between parts: channels, the groups behind them, staging through the host."""
