"""Speed and error of every kernel against a stock baseline timed in the same run."""
