"""What every experiment writes and draws: result files, the environment, plots, tables."""
