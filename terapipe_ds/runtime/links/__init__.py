"""Carry tensors between parts: channels, the groups behind them, staging through the host.

`stage_links` addresses the messages of a stage; a `channel` is one wire, which sends and receives them.
"""
