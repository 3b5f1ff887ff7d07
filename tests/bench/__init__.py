"""The trainer against a stock implementation of the same model, in one run on one machine."""
